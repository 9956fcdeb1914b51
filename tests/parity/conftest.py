"""Synthetic cases, traces, snapshots and goldens: small, exact, and made without any engine or oracle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.case import KV, Case, Feed
from parity.golden import Golden, Recording, golden_path
from parity.provenance import Provenance
from parity.reporting import results
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, activation_name, logits_name

VERSION = "0.32.2"
PLATFORM = "linux-x86_64-cpu"


@pytest.fixture(autouse=True)
def _no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Keep stored rows of this machine out of the tests, but for those that need a real snapshot."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what a tested check finds out of the checkout's reports."""
    folder = tmp_path / "reports"
    monkeypatch.setattr(results, "RESULTS", folder)
    return folder


@pytest.fixture
def make_case() -> Callable[..., Case]:
    def make(name: str = "toy/f32/fp/greedy/p3-whole", **fields: Any) -> Case:
        defaults: dict[str, Any] = {
            "snapshot": "toy",
            "dtype": "f32",
            "prompt_ids": (1, 2, 3),
            "forced_ids": None,
            "feed": Feed(mode="whole"),
            "kv": KV(),
            "num_steps": 3,
        }
        return Case(name=name, **{**defaults, **fields})

    return make


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    def make(case: Case, *, vocabulary: int = 16, modules: tuple[str, ...] = ()) -> Trace:
        tensors: dict[str, Tensor] = {}
        picked = []
        for step in range(case.num_steps):
            noise = np.random.PCG64(step).random_raw(vocabulary)
            row = ((noise >> np.uint64(40)).astype("<f4") / np.float32(2**22)).reshape(1, -1)
            for number, module in enumerate(modules):
                tensors[activation_name(step, module)] = Tensor.of(row[:, :4] + np.float32(number))
            tensors[logits_name(step)] = Tensor.of(row)
            picked.append(int(row.argmax()))
        tensors[TOKEN_IDS] = Tensor.of(np.array(picked, dtype="<i4"))
        return Trace(tensors=tensors, cache=("plain", "plain"))

    return make


@pytest.fixture
def make_snapshot(tmp_path: Path) -> Callable[..., Snapshot]:
    def make(name: str = "toy", weights: bytes = b"weights", model_type: str = "llama") -> Snapshot:
        folder = tmp_path / "snapshots" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        (folder / "model.safetensors").write_bytes(weights)
        return Snapshot.read(folder)

    return make


@pytest.fixture
def make_provenance() -> Callable[..., Provenance]:
    def make(**fields: Any) -> Provenance:
        defaults: dict[str, Any] = {
            "packages": {"mlx": "0.32.4", "mlx-cpu": "0.32.4", "mlx-lm": VERSION},
            "digests": {"mlx": "aa", "mlx-cpu": "bb", "mlx-lm": "cc"},
            "platform": PLATFORM,
            "device": "cpu",
            "libc": "glibc 2.36",
            "python": "3.11",
            "switches": {},
        }
        return Provenance(**{**defaults, **fields})

    return make


@pytest.fixture
def make_golden(make_provenance: Callable[..., Provenance]) -> Callable[..., Golden]:
    def make(case: Case, trace: Trace, snapshot: Snapshot, **provenance: Any) -> Golden:
        return Golden.of(
            case,
            trace,
            snapshot_files=snapshot.logit_files,
            provenance=make_provenance(**provenance),
            history=(Recording(oracle=f"mlx-lm {VERSION}", mlx="0.32.4", bits="b" * 64, reason="first recording"),),
        )

    return make


@pytest.fixture
def goldens(tmp_path: Path) -> Path:
    return tmp_path / "goldens"


@pytest.fixture
def saved(goldens: Path) -> Callable[[Golden], Path]:
    """Save a golden where the gate looks for it."""

    def save(golden: Golden) -> Path:
        file = golden_path(golden.case, version=VERSION, root=goldens, platform=PLATFORM)
        golden.save(file)
        return file

    return save


@pytest.fixture
def flip() -> Callable[..., Tensor]:
    """A copy of a tensor with one bit of one element flipped."""

    def flipped(tensor: Tensor, element: int = 0, bit: int = 0) -> Tensor:
        words = tensor.bits().copy().reshape(-1)
        words[element] ^= words.dtype.type(1 << bit)
        return Tensor(dtype=tensor.dtype, shape=tensor.shape, data=words.tobytes())

    return flipped
