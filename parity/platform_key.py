"""The platform key under which goldens are filed, such as `linux-x86_64-cpu`.

Bits are promised within one key and one mlx version only. The key says operating system, processor family and the kind of
device that mlx computes on; the C library's version is in the provenance, since tanh, erf and log1p come from it.
"""

import platform
import sys


def platform_key() -> str:
    """The key of this machine, from what mlx would compute on by default."""
    machine = platform.machine().lower().replace("aarch64", "arm64").replace("amd64", "x86_64")
    device = "metal" if (sys.platform, machine) == ("darwin", "arm64") else "cpu"
    return f"{sys.platform}-{machine}-{device}"
