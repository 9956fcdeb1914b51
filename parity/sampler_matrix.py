"""Sampler cases: reads the `[[sampler]]` and `[options.NAME]` tables of a file of cases.

`[options.NAME]` holds a chain's options under a name. A `[[sampler]]` table multiplies options, rows, dtypes, batches and seeds
into cases named `samplers/<chain>/<options>-<rows>/<dtype>/b<batch>/s<seed>`. `rows = "model"` draws from a snapshot's rows,
which the table then names; other rows are generated and need no model. The prompt is the history that processors see first
and, of model rows, what the model is fed. The chain says which oracle is believed: mlx-lm (L1), or mlx-optiq (L2) of `optiq`.

Guarantees: as `parity.matrix`; options that no table uses, and unknown ones, are errors.
"""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final, cast, get_args

from parity.case import KV, Case, DType, Feed
from parity.case_table import count, one_of, only, strings, wrong
from parity.errors import CaseError
from parity.logit_rows import GENERATED
from parity.sampling import CHAINS, MODEL, ORACLE_OF, Sampling, lacking, read_options
from parity.snapshot import NO_MODEL

LISTS: Final = ("options", "rows", "dtype")
KEYS: Final = (*LISTS, "chain", "batch", "seed", "prompt", "num_rows", "num_steps", "snapshot")

Options = Mapping[str, tuple[tuple[str, Any], ...]]


def read_options_tables(file: Path, raw: Mapping[str, Any]) -> Options:
    """The `[options.NAME]` tables of a file.

    Raises:
        CaseError: One is malformed.
    """
    tables = raw.get("options", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise wrong(file, "top level", "options", "[options.NAME] tables belong here")
    found = {}
    for name, table in tables.items():
        try:
            found[name] = read_options(table)
        except CaseError as error:
            raise wrong(file, f"[options.{name}]", name, f"{error.what}; known: {error.facts['known']}") from error
    return found


def sampler_cases(
    file: Path, label: str, table: Mapping[str, Any], options: Options, prompt_ids: Callable[[str], tuple[int, ...]]
) -> list[Case]:
    """The cases of one `[[sampler]]` table.

    Args:
        file: Where it stands.
        label: What messages call it.
        table: Its keys and values.
        options: The file's named options.
        prompt_ids: Ids of a named prompt of the file.

    Raises:
        CaseError: A key is missing or unknown, or a value is of the wrong kind.
    """
    only(file, label, table, KEYS)
    for key in LISTS:
        strings(file, label, table, key)
    one_of(file, label, "options", table["options"], tuple(options))
    one_of(file, label, "rows", table["rows"], (MODEL, *GENERATED))
    one_of(file, label, "dtype", table["dtype"], get_args(DType))
    one_of(file, label, "chain", [table.get("chain", "")], CHAINS)
    if (MODEL in table["rows"]) != ("snapshot" in table):
        raise wrong(file, label, "snapshot", f"a snapshot belongs here where rows has {MODEL!r}, and only there")
    batches, seeds = (_whole(file, label, table, key, least) for key, least in (("batch", 1), ("seed", 0)))
    for name, batch in product(table["options"], batches):
        if lacks := lacking(table["chain"], options[name], batch):
            raise wrong(file, label, "options" if batch == 1 else "batch", lacks)
    oracle = ORACLE_OF[table["chain"]]
    num_rows, num_steps = (count(file, label, table, key) for key in ("num_rows", "num_steps"))
    ids = prompt_ids(str(table.get("prompt")))
    cases = []
    for name, rows, dtype, batch, seed in product(*(table[key] for key in LISTS), batches, seeds):
        sampler = f"{table['chain']}/{name}-{rows}"
        cases.append(
            Case(
                name=f"samplers/{sampler}/{dtype}/b{batch}/s{seed}",
                snapshot=str(table["snapshot"]) if rows == MODEL else NO_MODEL.name,
                dtype=cast("DType", dtype),
                prompt_ids=ids,
                forced_ids=None,
                feed=Feed(mode="tail-split"),
                kv=KV(),
                sampler=sampler,
                num_steps=num_steps,
                tier="L1" if oracle == "mlx-lm" else "L2",
                oracle=oracle,
                sampling=Sampling(
                    chain=table["chain"], options=options[name], rows=rows, num_rows=num_rows, batch=batch, seed=seed
                ),
            )
        )
    return cases


def _whole(file: Path, label: str, table: Mapping[str, Any], key: str, least: int) -> list[int]:
    """A list of whole numbers of at least `least`."""
    value = table.get(key)
    if not isinstance(value, list) or not value or not all(type(v) is int and v >= least for v in value):
        raise wrong(file, label, key, f"a list of whole numbers of at least {least} belongs here, not {value!r}")
    return value
