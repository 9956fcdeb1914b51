"""The dearest work is begun first, and what is dear is the weights that a token reads, not the number of cases."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parity import gate
from parity.case import Case
from parity.snapshot import Snapshot


def test_one_case_of_a_large_model_comes_before_many_of_a_tiny_one(
    tmp_path: Path, make_case: Callable[..., Case], make_snapshot: Callable[..., Snapshot]
) -> None:
    def task(name: str, snapshot: str, weights: int) -> gate.Task:
        folder = tmp_path / snapshot
        folder.mkdir(exist_ok=True)
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(weights)
        found = replace(make_snapshot(snapshot), path=folder, files={"model.safetensors": "0" * 64})
        return gate.Task(
            case=make_case(name, snapshot=snapshot),
            snapshot=found,
            version=None,
            root=tmp_path,
            platform="p",
            deviations=(),
            traces=None,
        )

    tiny = [task(f"tiny/f32/fp/greedy/p{i}-whole", "tiny", 100_000) for i in range(20)]
    large = task("large/f32/fp/greedy/p1-whole", "large", 500_000_000)
    assert gate._by_model([*tiny, large])[0] is large
    assert gate._cost(large) > sum(map(gate._cost, tiny))
