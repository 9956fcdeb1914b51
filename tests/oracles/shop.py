"""A workshop with a fake oracle and a fake snapshot, and the handles that tests turn."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from oracles.recording import Recording, Workshop, record
from oracles.registry import Oracle
from parity.case import KV, Case, Feed
from parity.snapshot import Snapshot


def make_case(name: str = "tiny/f32/fp/greedy/p3", **changes: Any) -> Case:
    fields = {
        "name": name,
        "snapshot": "tiny",
        "dtype": "f32",
        "prompt_ids": (1, 2, 3),
        "forced_ids": None,
        "feed": Feed(mode="tail-split"),
        "kv": KV(),
        "num_steps": 2,
        "oracle": "fake",
    }
    return Case(**{**fields, **changes})


def fake_oracle(folder: Path) -> Oracle:
    lock = folder / "requirements.lock"
    lock.write_text("mlx==0 --hash=sha256:0\n")
    return Oracle(
        name="fake",
        version="1.0",
        entry="tests.oracles.fake_oracle",
        lock=lock,
        pins={"mlx": version("mlx")},
        believed_for="tests",
    )


class Shop:
    """A workshop, and the handles that tests turn."""

    def __init__(self, folder: Path, oracle: Oracle) -> None:
        self.folder = folder
        self.oracle = oracle
        self.goldens = folder / "goldens"
        self.snapshot = folder / "tiny"
        if not self.snapshot.exists():
            self.snapshot.mkdir()
            (self.snapshot / "config.json").write_text('{"model_type": "llama"}')
            (self.snapshot / "model.safetensors").write_bytes(b"weights")
            self.faults()

    def faults(self, **faults: Any) -> None:
        (self.snapshot / "fake.json").write_text(json.dumps(faults))

    @property
    def runs(self) -> list[str]:
        """Cases begun, by whatever parent."""
        return [name for name, _parent in self._log]

    @property
    def own_runs(self) -> list[str]:
        """Cases begun for this test's process."""
        return [name for name, parent in self._log if int(parent) == os.getpid()]

    @property
    def _log(self) -> list[list[str]]:
        log = self.snapshot / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split() for line in lines if len(line.split()) == 2]

    @property
    def workshop(self) -> Workshop:
        return Workshop(
            snapshot_of=lambda name: Snapshot.read(self.folder / name, name=name),
            oracle_of=lambda _name: self.oracle,
            environment_of=lambda _oracle: Path(sys.executable),
        )

    def files(self, folder: Path | None = None) -> dict[str, bytes]:
        root = folder or self.goldens
        return {f.relative_to(root).as_posix(): f.read_bytes() for f in sorted(root.rglob("*")) if f.is_file()}


def names(count: int) -> list[str]:
    return [f"tiny/f32/fp/greedy/p{i}" for i in range(count)]


def cases_of(count: int, **changes: Any) -> list[Case]:
    return [make_case(name, prompt_ids=(1, 2, i), **changes) for i, name in enumerate(names(count))]


def statuses(recording: Recording) -> list[str]:
    return [result.status for result in recording.results]


def do(shop: Shop, cases: list[Case], **options: Any) -> Recording:
    return record(cases, workshop=shop.workshop, root=shop.goldens, **options)
