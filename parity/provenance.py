"""What the bits of a run rest on: package contents, device, platform, C library, environment switches.

Guarantees: the same machine and environment give equal provenance, so goldens can be rebuilt byte for byte: no time
stamps, host names, absolute paths or commits (the commit of a golden is in git's own history). A package's digest covers
the files that its wheel carried, native libraries included, and none that an installer adds.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Final, Self

from parity.platform_key import platform_key

SWITCH_PREFIXES: Final = ("MLX_", "ASSAY_KERNELS", "GLIBC_TUNABLES", "LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What the bits of a run rest on.

    Attributes:
        packages: Distribution to version.
        digests: Distribution to SHA-256 over its wheel's file digests.
        platform: Platform key.
        device: mlx's default device, `cpu` or `gpu`.
        libc: C library and version: tanh, erf and log1p come from it.
        python: Major and minor version.
        switches: Environment variables that can change results, as set in the process.
    """

    packages: Mapping[str, str]
    digests: Mapping[str, str]
    platform: str
    device: str
    libc: str
    python: str
    switches: Mapping[str, str]

    @classmethod
    def capture(cls, packages: tuple[str, ...], *, device: str) -> Self:
        """Describe this process.

        Args:
            packages: Distributions whose code takes part; those not installed on this platform are left out.
            device: `cpu` or `gpu`, as mlx says.
        """
        versions: dict[str, str] = {}
        digests: dict[str, str] = {}
        for name in packages:
            try:
                versions[name] = distribution(name).version
            except PackageNotFoundError:
                continue
            digests[name] = wheel_digest(name)
        return cls(
            packages=versions,
            digests=digests,
            platform=platform_key(),
            device=device,
            libc=" ".join(platform.libc_ver()).strip() or f"{platform.system()} {platform.release()}",
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            switches={k: v for k, v in sorted(os.environ.items()) if k.startswith(SWITCH_PREFIXES)},
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back to an equal provenance."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            TypeError: A field is missing or unknown.
        """
        return cls(**raw)


def wheel_digest(name: str) -> str:
    """SHA-256 over the digests that an installed distribution's RECORD lists for the files of its wheel.

    Raises:
        PackageNotFoundError: It is not installed.
    """
    lines = [
        f"{file}={file.hash.mode}:{file.hash.value}"
        for file in distribution(name).files or ()
        if file.hash is not None and ".dist-info" not in file.parts[0] and file.parts[0] != ".."
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
