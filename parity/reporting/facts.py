"""The report's facts: one JSON object, put together from result files. Page and Markdown print it and know nothing else.

Guarantees: numbers are copied from result files or counted over them; nothing is judged again. Keys and their order are the
same for the same results: no time stamps, no paths of this machine.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pandas as pd

from parity.errors import UsageError
from parity.reporting.results import CHECK, Json, load, load_check

TENSORS_SHOWN: Final = 12  # differing tensors listed in a section; the JSON of the check has them all
NO_FAMILY: Final = "samplers"
PASSED: Final = "IDENTICAL"


def _is(column: str, word: object, rows: pd.DataFrame) -> pd.Series:
    return rows[column] == word


# What is counted of each group: a column's name and the rows that it counts.
_FATES: Final[dict[str, Callable[[pd.DataFrame], pd.Series]]] = {
    "caught": partial(_is, "fate", "CAUGHT"),
    "localised": partial(_is, "localised", True),
    "false alarms": partial(_is, "false_alarm", True),
}
_VERDICTS: Final[dict[str, Callable[[pd.DataFrame], pd.Series]]] = {
    word: partial(_is, "verdict", word) for word in ("equal", "different", "refused")
}

TextOf = Callable[[str, int], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What was found in a folder of results; None or empty where a verb has left nothing.

    Attributes:
        check: `check.json`.
        bench: `bench*.json`, by file name.
        mutation: `mutation.json`.
        sweep: `sweep.json`.
        explained: Case name to what `assay explain` said, `explain/**/*.json`.
        history: Rows of the bench history, oldest run first: `run`, `name`, `peer`, `ratio`, `low`, `high` and more.
    """

    check: Json | None = None
    bench: Mapping[str, Json] = field(default_factory=dict)
    mutation: Json | None = None
    sweep: Json | None = None
    explained: Mapping[str, Json] = field(default_factory=dict)
    history: Sequence[Json] = ()


def read_results(folder: Path, *, history: Sequence[Json] = ()) -> Results:
    """Everything that verbs have left in a folder.

    Raises:
        UsageError: There is nothing, or a file cannot be believed.
    """
    bench = {file.name: load(file) or {} for file in sorted(folder.glob("bench*.json"))}
    explained = {}
    for file in sorted((folder / "explain").rglob("*.json")):
        found = load(file) or {}
        explained[str(found.get("case", ""))] = found
    results = Results(
        check=load_check(folder),
        bench=bench,
        mutation=load(folder / "mutation.json"),
        sweep=load(folder / "sweep.json"),
        explained=explained,
        history=history,
    )
    if results.check is None and not (results.bench or results.mutation or results.sweep):
        raise UsageError(
            "there is nothing to report on",
            looked_at=f"{CHECK}, bench*.json, mutation.json, sweep.json in {folder.name}/",
            next_step=f"assay check --results {folder}",
        )
    return results


def facts(results: Results, *, text_of: TextOf = lambda _snapshot, _token: None) -> Json:
    """The whole report as plain values.

    Args:
        results: What was found.
        text_of: Snapshot and token id to the token's text; None where there is no tokenizer.
    """
    check = results.check
    cases = check["cases"] if check else []
    numbers = {case["case"]: number for number, case in enumerate(c for c in cases if not _quiet(c))}
    listed = [_listed(case, numbers) for case in cases]
    return {
        "overview": _overview(check) if check else None,
        "grid": _grid(listed),
        "families": _families(listed),
        "differences": [
            _difference(case, results.explained.get(case["case"]), text_of) for case in cases if not _quiet(case)
        ],
        "mutation": _tallied(results.mutation, "faults", ["kind"], _FATES),
        "sweep": _tallied(results.sweep, "rows", ["subject", "invariance"], _VERDICTS),
        "bench": [_bench(name, result) for name, result in results.bench.items()],
        "history": list(results.history),
        "provenance": check["provenance"] if check else [],
    }


def _quiet(case: Json) -> bool:
    return bool(case["status"] == PASSED)


def _overview(check: Json) -> Json:
    cases = check["cases"]
    return {
        "pattern": check["pattern"],
        "left_out": check["left_out"],
        "num_cases": len(cases),
        "num_passing": sum(case["passes"] for case in cases),
        "counts": [{"status": status, "cases": count} for status, count in check["counts"].items()],
        "oracles": sorted({case["oracle"] for case in cases if case["oracle"]}),
    }


def _listed(case: Json, numbers: Mapping[str, int]) -> Json:
    """A case in a list: what it is, its verdict, and the number of its section where it has one."""
    keys = ("case", "status", "passes", "model_type", "snapshot", "kv", "dtype", "tier", "oracle", "num_steps")
    return {**{key: case[key] for key in keys}, "difference": numbers.get(case["case"])}


def _family(case: Json) -> str:
    return case["model_type"] or NO_FAMILY


def kv_kind(mode: str | None) -> str:
    """A KV mode without its sizes, so that a grid of them can be read: `kv4-g32-s16` is `kvB-gG-sN`."""
    if mode is None:
        return "-"
    if mode.startswith("config-"):
        return "config"
    lettered = re.sub(r"kv\d+-g\d+", "kvB-gG", mode)
    return re.sub(r"(?<=[a-z@-])\d+", "N", lettered)


def _grid(listed: Sequence[Json]) -> Json:
    """Family x kind of KV mode, in each cell a count for each dtype; `difference` is the first section of the cell, if any."""
    if not listed:
        return {"kv": [], "rows": []}
    frame = pd.DataFrame(
        {
            "family": [_family(case) for case in listed],
            "kv": [kv_kind(case["kv"]) for case in listed],
            "dtype": [case["dtype"] or "-" for case in listed],
            "passes": [bool(case["passes"]) for case in listed],
            "difference": [case["difference"] for case in listed],
        }
    )
    modes = list(dict.fromkeys(frame["kv"]))
    rows = []
    for family, of_family in frame.groupby("family", sort=True):
        cells: list[list[Json]] = []
        for mode in modes:
            groups = of_family[of_family["kv"] == mode].groupby("dtype", sort=False)
            cells.append(
                [
                    {
                        "dtype": str(dtype),
                        "cases": len(group),
                        "passing": int(group["passes"].sum()),
                        "difference": None if group["difference"].isna().all() else int(group["difference"].min()),
                    }
                    for dtype, group in groups
                ]
            )
        rows.append({"family": str(family), "cells": cells})
    return {"kv": modes, "rows": rows}


def _families(listed: Sequence[Json]) -> list[Json]:
    families: dict[str, list[Json]] = {}
    for case in listed:
        families.setdefault(_family(case), []).append(case)
    return [
        {
            "family": name,
            "num_cases": len(members),
            "num_passing": sum(case["passes"] for case in members),
            "cases": members,
        }
        for name, members in sorted(families.items())
    ]


def _difference(case: Json, explained: Json | None, text_of: TextOf) -> Json:
    """A section: everything known of one case that is not simply identical."""
    tensors = case["tensors"]
    first = next((t for t in tensors if t["name"].startswith("logits/")), tensors[0] if tensors else None)
    rows = case["rows"]
    shown = next((row for row in rows if row["num_different"] != 0), None)
    explained = _explained(case, explained)
    return {
        **{key: case[key] for key in ("case", "status", "passes", "what", "first_step", "num_steps", "place", "next")},
        "earliest": case["earliest"] or (explained or {}).get("earliest"),
        "cause": _cause(case, explained),
        "facts": [{"name": name, "value": value} for name, value in case["facts"].items()],
        "first_tensor": first,
        "modules": _modules(tensors, case["first_step"]),
        "num_differing": case["num_differing"],
        "tensors": tensors[:TENSORS_SHOWN],
        "rows": [
            {key: row[key] for key in ("step", "num_different", "max_ulp", "kl", "flips", "margin")} for row in rows
        ],
        "top": None if shown is None else _top(case["snapshot"], shown, text_of),
        "explained": explained,
    }


def _bench(file: str, result: Json) -> Json:
    """A bench result: its figures with every key that a table shows, its machine, and whatever else it holds."""
    keys = ("name", "peer", "unit", "engine", "peer_value", "ratio", "low", "high", "bits_identical")
    return {
        "file": file,
        "figures": [{**dict.fromkeys(keys), **figure} for figure in result.get("figures", [])],
        "machine": result.get("machine"),
        "others": {key: value for key, value in result.items() if key not in ("figures", "machine")},
    }


def _tallied(
    result: Json | None, rows: str, groups: Sequence[str], counted: Mapping[str, Callable[[pd.DataFrame], pd.Series]]
) -> Json | None:
    """A result with `tally`: its rows by group, how many and how many of them count as what."""
    if not result or not result.get(rows):
        return result
    frame = pd.DataFrame(result[rows])
    marks = pd.DataFrame({name: of(frame).astype(bool) for name, of in counted.items()})
    table = pd.concat([frame[list(groups)], marks], axis=1).groupby(list(groups), sort=False)
    tally = [
        {**dict(zip(groups, names, strict=True)), "all": len(members), **{n: int(members[n].sum()) for n in counted}}
        for names, members in table
    ]
    return {**{key: value for key, value in result.items() if key != rows}, "tally": tally, rows: result[rows]}


def _explained(case: Json, explained: Json | None) -> Json | None:
    """What `assay explain` said, if it looked at this difference and no other; without paths of the machine."""
    if explained is None or explained.get("first_step", case["first_step"]) != case["first_step"]:
        return None
    return {name: value for name, value in explained.items() if name != "reproducer"}


def _cause(case: Json, explained: Json | None) -> str | None:
    """`rounding (evidence)`, from the verdict or else from the explanation."""
    if case["cause"] or explained is None or not explained.get("cause"):
        return case["cause"] or None
    evidence = explained.get("evidence")
    return f"{explained['cause']} ({evidence})" if evidence else str(explained["cause"])


def _modules(tensors: Sequence[Json], step: int | None) -> list[Json]:
    """Recorded activations that differ at the first differing step, in execution order."""
    prefix = f"activations/{step}/"
    return [
        {"module": t["name"].removeprefix(prefix), **{k: t[k] for k in ("num_different", "num_elements", "max_ulp")}}
        for t in tensors
        if t["name"].startswith(prefix)
    ]


def _top(snapshot: str | None, row: Json, text_of: TextOf) -> Json:
    """The likeliest ids before and after, side by side by rank."""

    def told(scored: Sequence[Sequence[float]]) -> list[Json]:
        return [
            {"id": int(i), "text": text_of(snapshot, int(i)) if snapshot else None, "logprob": p} for i, p in scored
        ]

    pairs = zip(told(row["expected_top"]), told(row["actual_top"]), strict=False)
    return {"step": row["step"], "ranks": [{"expected": want, "actual": got} for want, got in pairs]}
