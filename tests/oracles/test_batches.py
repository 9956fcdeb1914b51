from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oracles.batches import split
from oracles.process import Task


def task(index: int, snapshot: Any, dtype: Any, length: int) -> Task:
    case = {"name": str(index), "dtype": dtype, "prompt_ids": [1] * length, "num_steps": 2}
    return Task(case=case, snapshot={"name": snapshot, "path": "/x"}, out=Path(str(index)))


WORK = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["f32", "bf16"]), st.integers(1, 50)), max_size=30)
WEIGHTS = {"a": 1, "b": 10, "c": 1000}


@given(work=WORK, jobs=st.integers(1, 5))
def test_every_task_is_in_exactly_one_job_and_the_split_is_repeatable(work: Any, jobs: int) -> None:
    tasks = [task(i, *what) for i, what in enumerate(work)]
    loads = split(tasks, jobs, WEIGHTS)
    assert sorted(t.name for load in loads.values() for t in load) == sorted(t.name for t in tasks)
    assert len(loads) <= jobs
    assert all(loads.values())
    assert loads == split(tasks, jobs, WEIGHTS)


@given(work=WORK, jobs=st.integers(1, 5))
def test_a_job_meets_each_snapshot_and_dtype_once(work: Any, jobs: int) -> None:
    for load in split([task(i, *what) for i, what in enumerate(work)], jobs, WEIGHTS).values():
        keys = [(t.snapshot["name"], t.case["dtype"]) for t in load]
        runs = [key for i, key in enumerate(keys) if i == 0 or keys[i - 1] != key]
        assert len(runs) == len(set(runs))


def test_one_large_group_is_shared_between_two_processes() -> None:
    loads = split([task(i, "c", "f32", 10) for i in range(8)], 2, WEIGHTS)
    assert [len(load) for load in loads.values()] == [4, 4]


def test_small_groups_are_not_torn() -> None:
    tasks = [task(i, snapshot, "f32", 10) for i, snapshot in enumerate("aabb")]
    loads = split(tasks, 2, {"a": 1, "b": 1})
    assert sorted({t.snapshot["name"] for t in load} == {"a"} for load in loads.values()) == [False, True]
