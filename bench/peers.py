"""The peers that the engine is measured beside, each a process in an environment of its own.

mlx-lm is the oracle of that name; llama.cpp, prebuilt in the wheel of xllamacpp, is described in oracles/xllamacpp/peer.toml
and its environment is built when it is first asked for.
"""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.worker import Worker
from oracles.environment import ensure_environment
from oracles.process import hermetic
from oracles.registry import REPOSITORY, Oracle, find_oracle

MLX_LM: Final = "mlx-lm"
LLAMA_CPP: Final = "llama.cpp"
PEER_TABLE: Final = REPOSITORY / "oracles" / "xllamacpp" / "peer.toml"


def llama_cpp() -> Oracle:
    """llama.cpp's description."""
    ((name, raw),) = tomllib.loads(PEER_TABLE.read_text(encoding="utf-8")).items()
    return Oracle.from_toml(name, raw, PEER_TABLE.parent)


def peer_worker(name: str, private: Path, on_line: Callable[[str], None]) -> Worker:
    """Start a peer; the caller ends it.

    Args:
        name: `mlx-lm` or `llama.cpp`.
        private: An existing folder of its own.
        on_line: Told when its environment is built.
    """
    described = find_oracle(name) if name == MLX_LM else llama_cpp()
    entry = "oracles.mlx_lm.bench_worker" if name == MLX_LM else described.entry
    python = ensure_environment(described, on_line=on_line)
    return Worker(name, [str(python), "-m", entry], hermetic(private), hermetic=True)


def engine_worker() -> Worker:
    """Start the engine; the caller ends it. It has this process's environment, `ASSAY_KERNELS` with it."""
    return Worker("engine", [sys.executable, "-m", "bench.engine_worker"], {})


def versions() -> dict[str, str]:
    """Peer to version."""
    return {MLX_LM: find_oracle(MLX_LM).version, LLAMA_CPP: llama_cpp().version}
