# mypy: disable-error-code="attr-defined,import-untyped"
"""What a proof of a kernel holds for: this mlx, these libraries, this CPU, this compiler, these sources.

Guarantees: a change of any of them gives another identity, so that an old proof is never taken for a new one. Libraries
are read, not believed: their digest is over the files as they are.
"""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import mlx.core as mx
import numba

from engine.kernels.driver import source_digest


@cache
def identity() -> str:
    """SHA-256 in hex over all that the bits of mlx and of the kernels rest on."""
    features = llvm.get_host_cpu_features().flatten()
    lines = [
        f"mlx={version('mlx')}",
        f"libraries={_libraries()}",
        f"cpu={llvm.get_host_cpu_name()} {features}",
        f"numba={numba.__version__} {numba.config.CPU_NAME} {numba.config.CPU_FEATURES}",
        f"llvmlite={llvmlite.__version__} {llvm.llvm_version_info}",
        f"kernels={source_digest()}",
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _libraries() -> str:
    """SHA-256 over the native libraries that mlx brings, in the order of their names."""
    package = Path(str(mx.__file__)).parent
    folders = [package, *package.parent.glob("mlx*.libs")]
    digest = hashlib.sha256()
    for file in sorted(
        f for folder in folders for f in folder.rglob("*") if ".so" in f.suffixes or f.suffix == ".dylib"
    ):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
