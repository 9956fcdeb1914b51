"""Batch cases: reads the `[[batch]]` and `[plan.NAME]` tables of a file of cases.

`[plan.NAME]` says which sequences there are: `lengths` of their prompts, `steps` (rows of logits each) and, where some come
later, `joins`. A `[[batch]]` table multiplies snapshots, dtypes, KV modes, drives, plans, fills and feeds into cases named
`<snapshot>/<dtype>/<kv>/<drive>/batch-<plan>-<fill>-<feed>`. Ids are drawn below `vocabulary`, seeded by the plan's name and
the sequence's number.

Guarantees: as `parity.matrix`; a plan that no table uses, and a malformed one, are errors.
"""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final, cast, get_args

from parity.batch import FILLS, Batch, Fill
from parity.case import KV, Case, DType, Feed
from parity.case_table import count, one_of, only, strings, wrong
from parity.errors import CaseError

LISTS: Final = ("snapshot", "dtype", "kv", "drive", "plan", "fill", "feed")
KEYS: Final = (*LISTS, "vocabulary", "oracle")
PLAN_KEYS: Final = ("lengths", "steps", "joins")
TIERS: Final = {"mlx-lm": "L1", "mlx-optiq": "L2"}

Plans = Mapping[str, Mapping[str, tuple[int, ...]]]
Draw = Callable[[str, int, int], tuple[int, ...]]


def read_plans(file: Path, raw: Mapping[str, Any]) -> Plans:
    """The `[plan.NAME]` tables of a file: `lengths`, `steps` and `joins` of each.

    Raises:
        CaseError: One is malformed.
    """
    tables = raw.get("plan", {})
    if not isinstance(tables, dict):
        raise wrong(file, "top level", "plan", "[plan.NAME] tables belong here")
    plans: dict[str, Mapping[str, tuple[int, ...]]] = {}
    for name, table in tables.items():
        label = f"[plan.{name}]"
        only(file, label, table, PLAN_KEYS)
        plan = {key: table.get(key, []) for key in PLAN_KEYS}
        plan["joins"] = table.get("joins", [0] * len(plan["lengths"]))
        for key, values in plan.items():
            if not isinstance(values, list) or not values or not all(type(v) is int for v in values):
                raise wrong(file, label, key, f"a list of whole numbers belongs here, not {values!r}")
        plans[name] = {key: tuple(values) for key, values in plan.items()}
    return plans


def batch_cases(file: Path, label: str, table: Mapping[str, Any], plans: Plans, draw: Draw) -> list[Case]:
    """The cases of one `[[batch]]` table.

    Args:
        file: Where it stands.
        label: What messages call it.
        table: Its keys and values.
        plans: The file's plans.
        draw: Seed, length and vocabulary to token ids.

    Raises:
        CaseError: A key is missing or unknown, or a value is of the wrong kind.
    """
    only(file, label, table, KEYS)
    for key in LISTS:
        strings(file, label, table, key)
    one_of(file, label, "dtype", table["dtype"], get_args(DType))
    one_of(file, label, "drive", table["drive"], ("greedy", "forced"))
    one_of(file, label, "plan", table["plan"], tuple(plans))
    one_of(file, label, "fill", table["fill"], FILLS)
    oracle = table.get("oracle", "mlx-lm")
    one_of(file, label, "oracle", [oracle], tuple(TIERS))
    vocabulary = count(file, label, table, "vocabulary")
    cases = []
    for snapshot, dtype, kv, drive, plan, fill, feed in product(*(table[key] for key in LISTS)):
        try:
            batch = Batch(fill=cast("Fill", fill), **plans[plan])
        except CaseError as error:
            raise wrong(file, f"[plan.{plan}]", plan, f"{error.what}: {error.next_step}") from error
        forced = drive == "forced"
        cases.append(
            Case(
                name=f"{snapshot}/{dtype}/{kv}/{drive}/batch-{plan}-{fill}-{feed}",
                snapshot=snapshot,
                dtype=cast("DType", dtype),
                prompt_ids=_drawn(draw, f"batch/{plan}", batch.lengths, vocabulary),
                forced_ids=_drawn(draw, f"forced/batch/{plan}", batch.steps, vocabulary) if forced else None,
                feed=Feed.parse(feed),
                kv=KV.parse(kv),
                num_steps=sum(batch.steps),
                tier=cast("Any", TIERS[oracle]),
                oracle=oracle,
                batch=batch,
            )
        )
    return cases


def _drawn(draw: Draw, seed: str, lengths: tuple[int, ...], vocabulary: int) -> tuple[int, ...]:
    drawn = (draw(f"{seed}/{i}", length, vocabulary) for i, length in enumerate(lengths))
    return tuple(token_id for ids in drawn for token_id in ids)
