"""How the cases of a recording are split over processes.

Guarantees: cases of one snapshot and dtype stay together, in their order, unless that would leave a process idle; every task
is in exactly one job; the same input gives the same split.
"""

from collections.abc import Mapping, Sequence

from oracles.process import Task


def split(tasks: Sequence[Task], jobs: int, weights: Mapping[str, int]) -> dict[int, list[Task]]:
    """Split tasks over at most `jobs` processes of about equal work.

    Args:
        tasks: What is to be run.
        jobs: Processes at most; at least one.
        weights: Snapshot name to the size of its weights in bytes: a forward costs about that much.

    Returns:
        Number of the job to its tasks, largest job first; no job is empty.
    """
    groups: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.snapshot["name"], str(task.case["dtype"])), []).append(task)
    fair = sum(_cost(task, weights) for task in tasks) / max(jobs, 1)
    pieces = [piece for group in groups.values() for piece in _cut(group, fair, weights)]
    pieces.sort(key=lambda piece: -_total(piece, weights))  # a stable sort: equal pieces keep their order
    loads: dict[int, list[Task]] = {job: [] for job in range(max(jobs, 1))}
    for piece in pieces:
        loads[min(loads, key=lambda job: _total(loads[job], weights))].extend(piece)
    full = [_together(load) for load in loads.values() if load]
    return dict(enumerate(full))


def _cut(group: list[Task], fair: float, weights: Mapping[str, int]) -> list[list[Task]]:
    """Cut a group into runs of about a fair share."""
    pieces: list[list[Task]] = [[]]
    for task in group:
        if pieces[-1] and _total(pieces[-1], weights) + _cost(task, weights) > fair * 1.05:
            pieces.append([])
        pieces[-1].append(task)
    return pieces


def _together(load: list[Task]) -> list[Task]:
    """Bring tasks of one snapshot and dtype side by side, so that each model is loaded once."""
    order: dict[tuple[str, str], list[Task]] = {}
    for task in load:
        order.setdefault((task.snapshot["name"], str(task.case["dtype"])), []).append(task)
    return [task for group in order.values() for task in group]


def _cost(task: Task, weights: Mapping[str, int]) -> int:
    """A rough price: forwards times the bytes that each reads. Draws of a sampler case cost next to nothing."""
    if task.case.get("sampling"):
        return int(task.case["num_steps"])
    return (len(task.case["prompt_ids"]) + int(task.case["num_steps"])) * max(weights.get(task.snapshot["name"], 1), 1)


def _total(tasks: Sequence[Task], weights: Mapping[str, int]) -> int:
    return sum(_cost(task, weights) for task in tasks)
