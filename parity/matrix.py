"""The matrix: reads `parity/cases/*.toml`, the only place where cases are written.

A file holds named prompts (`[prompt.NAME]`), named lists of forced ids (`[forced.NAME]`, NAME being a prompt's) and
`[[matrix]]` tables, each of which multiplies its lists into cases. Prompts and forced ids are either written (`ids`, with
`text` or `chat` for people and for the test that tokenises it) or `random`: drawn from a generator that is seeded by the
name, so that they are the same on every machine and with every numpy. `[[sampler]]` and `[options.NAME]` tables are
`parity.sampler_matrix`'s.

Guarantees: every name is unique; an unknown key, a missing one or a value of the wrong kind is a `CaseError` that names
file, table and key; the order of cases is that of files (by name), tables and lists.
"""

import difflib
import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, Final, cast, get_args

import numpy as np

from parity.batch_matrix import batch_cases, read_plans
from parity.case import KV, Case, DType, Feed, Tier
from parity.case_table import count, mend, one_of, only, strings, wrong
from parity.errors import CaseError, UsageError
from parity.sampler_matrix import read_options_tables, sampler_cases

CASES: Final = Path(__file__).parent / "cases"
LISTS: Final = ("snapshot", "dtype", "kv", "drive", "prompt", "feed")
OPTIONAL: Final = ("tier", "oracle", "record", "full_rows")
DRIVES: Final = ("greedy", "forced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a case is written: a file's name and the line of its `[[matrix]]`."""

    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A named prompt or a named list of forced ids.

    Attributes:
        ids: Token ids.
        vocabulary: Of random ids: they are below it; None where they are written.
        text: What `ids` tokenises, if it is plain text.
        chat: What `ids` tokenises, if it is one user message in the snapshot's chat template.
    """

    ids: tuple[int, ...]
    vocabulary: int | None = None
    text: str | None = None
    chat: str | None = None


def load_cases(folder: Path = CASES) -> tuple[Case, ...]:
    """All cases.

    Raises:
        CaseError: A file is malformed, two cases share a name, or there is none.
    """
    return tuple(case for case, _ in placed_cases(folder))


def placed_cases(folder: Path = CASES) -> tuple[tuple[Case, Place], ...]:
    """All cases, each with the place where it is written.

    Raises:
        CaseError: As `load_cases`.
    """
    placed = [pair for file in sorted(folder.glob("*.toml")) for pair in _read(file)]
    if not placed:
        raise CaseError("there are no cases", looked_at=f"{folder.name}/*.toml", next_step="write one in parity/cases")
    seen: dict[str, Place] = {}
    for case, place in placed:
        if first := seen.get(case.name):
            raise CaseError(
                f"two cases are named {case.name!r}",
                first=f"{first.file}, line {first.line}",
                second=f"{place.file}, line {place.line}",
                next_step="give one of them another prompt, or take it out of a list",
            )
        seen[case.name] = place
    return tuple(placed)


def select(cases: Iterable[Case], pattern: str | None) -> tuple[Case, ...]:
    """Cases whose names match a shell glob; all of them without one.

    Raises:
        UsageError: None matches; near names are listed.
    """
    every = tuple(cases)
    chosen = every if pattern is None else tuple(c for c in every if c.name == pattern or fnmatchcase(c.name, pattern))
    if chosen:
        return chosen
    names = [case.name for case in every]
    near = difflib.get_close_matches(pattern or "", names, n=5, cutoff=0.4)
    raise UsageError(
        f"no case matches {pattern!r}" if pattern is not None else "there are no cases",
        near="\n".join(near) or "none",
        cases=len(names),
        next_step="assay cases",
    )


def read_prompts(file: Path, kind: str = "prompt") -> dict[str, Prompt]:
    """The `[prompt.NAME]` tables, or with `kind="forced"` the `[forced.NAME]` tables, of one file.

    Raises:
        CaseError: The file or one of these tables is malformed.
    """
    return _prompts(file, kind, _toml(file).get(kind, {}))


def random_ids(seed: str, length: int, vocabulary: int) -> tuple[int, ...]:
    """Ids below `vocabulary`, seeded by a name.

    Raw PCG64 words, whose stream numpy promises never to change, scaled by multiply and shift; numpy's own bounded integers
    may change from one version to the next.
    """
    words = np.random.PCG64(int.from_bytes(hashlib.sha256(seed.encode()).digest())).random_raw(length)
    return tuple((int(word) >> 32) * vocabulary >> 32 for word in words)


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError("a file of cases cannot be read", file=file.name, reason=error, next_step=mend(file)) from error


def _read(file: Path) -> list[tuple[Case, Place]]:
    raw = _toml(file)
    only(file, "top level", raw, ("prompt", "forced", "matrix", "options", "sampler", "plan", "batch"))
    prompts = _prompts(file, "prompt", raw.get("prompt", {}))
    forced = _prompts(file, "forced", raw.get("forced", {}))
    tables = raw.get("matrix", [])
    if not isinstance(tables, list) or not (tables or raw.get("batch")):
        raise wrong(file, "top level", "matrix", "at least one [[matrix]] table is needed")
    if stray := sorted(set(forced) - set(prompts)):
        raise wrong(file, f"[forced.{stray[0]}]", stray[0], "no prompt of this name")
    placed: list[tuple[Case, Place]] = []
    for place, table in _places(file, "matrix", tables):
        placed += [(case, place) for case in _multiply(file, place, table, prompts, forced)]
    used = {name for table in tables for name in table["prompt"]}
    placed += _samplers(file, raw, prompts, used)
    placed += _batches(file, raw)
    if idle := sorted(set(prompts) - used):
        raise wrong(file, f"[prompt.{idle[0]}]", idle[0], "no [[matrix]] uses this prompt")
    return placed


def _places(file: Path, kind: str, tables: list[Any]) -> list[tuple[Place, Any]]:
    """The `[[kind]]` tables, each with the place where it stands."""
    text = file.read_text(encoding="utf-8").splitlines()
    lines = [n for n, line in enumerate(text, 1) if re.match(rf"\s*\[\[\s*{kind}\s*\]\]", line)]
    return [(Place(file=file.name, line=lines[n] if n < len(lines) else 1), table) for n, table in enumerate(tables)]


def _batches(file: Path, raw: Mapping[str, Any]) -> list[tuple[Case, Place]]:
    """The batch cases of a file."""
    tables, plans = raw.get("batch", []), read_plans(file, raw)
    if not isinstance(tables, list):
        raise wrong(file, "top level", "batch", "[[batch]] tables belong here")
    placed = []
    for place, table in _places(file, "batch", tables):
        label = f"[[batch]] at line {place.line}"
        placed += [(case, place) for case in batch_cases(file, label, table, plans, random_ids)]
    if idle := sorted(set(plans) - {name for table in tables for name in table["plan"]}):
        raise wrong(file, f"[plan.{idle[0]}]", idle[0], "no [[batch]] uses this plan")
    return placed


def _samplers(
    file: Path, raw: Mapping[str, Any], prompts: Mapping[str, Prompt], used: set[str]
) -> list[tuple[Case, Place]]:
    """The sampler cases of a file; adds the prompts that they use to `used`."""
    tables = raw.get("sampler", [])
    if not isinstance(tables, list):
        raise wrong(file, "top level", "sampler", "[[sampler]] tables belong here")
    options = read_options_tables(file, raw)

    def ids(name: str) -> tuple[int, ...]:
        one_of(file, "[[sampler]]", "prompt", [name], tuple(prompts))
        used.add(name)
        return prompts[name].ids

    placed = []
    for place, table in _places(file, "sampler", tables):
        label = f"[[sampler]] at line {place.line}"
        placed += [(case, place) for case in sampler_cases(file, label, table, options, ids)]
    if idle := sorted(set(options) - {name for table in tables for name in table["options"]}):
        raise wrong(file, f"[options.{idle[0]}]", idle[0], "no [[sampler]] uses these options")
    return placed


def _multiply(
    file: Path, place: Place, table: Mapping[str, Any], prompts: Mapping[str, Prompt], forced: Mapping[str, Prompt]
) -> list[Case]:
    label = f"[[matrix]] at line {place.line}"
    only(file, label, table, (*LISTS, "num_steps", *OPTIONAL))
    for key in LISTS:
        strings(file, label, table, key)
    num_steps = table.get("num_steps")
    if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
        raise wrong(file, label, "num_steps", f"a whole number of at least 1 belongs here, not {num_steps!r}")
    one_of(file, label, "dtype", table["dtype"], get_args(DType))
    one_of(file, label, "drive", table["drive"], DRIVES)
    one_of(file, label, "prompt", table["prompt"], tuple(prompts))
    tier, oracle = table.get("tier", "L1"), table.get("oracle", "mlx-lm")
    one_of(file, label, "tier", [tier], get_args(Tier))
    if tier == "L3":
        raise wrong(file, label, "tier", "L3 needs a declared metric and bound, which no case can state yet")
    if not isinstance(oracle, str) or not oracle:
        raise wrong(file, label, "oracle", f"the name of an oracle belongs here, not {oracle!r}")
    record = strings(file, label, table, "record") if "record" in table else []
    if type(table.get("full_rows", False)) is not bool:
        raise wrong(file, label, "full_rows", f"true or false belongs here, not {table['full_rows']!r}")
    cases = []
    for snapshot, dtype, kv, drive, prompt, feed in product(*(table[key] for key in LISTS)):
        name = f"{snapshot}/{dtype}/{kv}/{drive}/{prompt}-{feed}"
        ids = (
            None
            if drive == "greedy"
            else _forced_ids(file, label, name=prompt, prompt=prompts[prompt], forced=forced, num_steps=num_steps)
        )
        try:
            cases.append(
                Case(
                    name=name,
                    snapshot=snapshot,
                    dtype=dtype,
                    prompt_ids=prompts[prompt].ids,
                    forced_ids=ids,
                    feed=Feed.parse(feed),
                    kv=KV.parse(kv),
                    num_steps=num_steps,
                    tier=cast("Tier", tier),
                    oracle=oracle,
                    record=tuple(record),
                    full_rows=table.get("full_rows", False),
                )
            )
        except CaseError as error:
            place_facts: dict[str, object] = {"file": file.name, "table": label, "case": name}
            raise CaseError(error.what, next_step=error.next_step, **{**place_facts, **error.facts}) from error
    return cases


def _forced_ids(
    file: Path, label: str, *, name: str, prompt: Prompt, forced: Mapping[str, Prompt], num_steps: int
) -> tuple[int, ...]:
    """From `[forced.NAME]`, or drawn like a random prompt's ids where the prompt is random and has no such table."""
    if name in forced:
        ids = forced[name].ids
        if len(ids) < num_steps:
            raise wrong(file, label, "num_steps", f"[forced.{name}] has {len(ids)} ids for {num_steps} steps")
        return ids[:num_steps]
    if prompt.vocabulary is None:
        raise wrong(file, label, "drive", f"forced needs a [forced.{name}] table, since the prompt is a written one")
    return random_ids(f"forced/{name}", num_steps, prompt.vocabulary)


def _prompts(file: Path, kind: str, tables: object) -> dict[str, Prompt]:
    if not isinstance(tables, dict):
        raise wrong(file, "top level", kind, f"[{kind}.NAME] tables belong here")
    return {name: _prompt(file, f"[{kind}.{name}]", f"{kind}/{name}", table) for name, table in tables.items()}


def _prompt(file: Path, label: str, seed: str, table: object) -> Prompt:
    if not isinstance(table, dict):
        raise wrong(file, label, seed, "a table belongs here")
    only(file, label, table, ("ids", "text", "chat", "random"))
    if ("ids" in table) == ("random" in table) or ("text" in table and "chat" in table):
        raise wrong(file, label, "ids", "either ids, with text or chat beside them, or random belongs here")
    if "random" in table:
        drawn = table["random"]
        if not isinstance(drawn, dict):
            raise wrong(file, label, "random", "{length = N, vocabulary = V} belongs here")
        only(file, label, drawn, ("length", "vocabulary"))
        length, vocabulary = (count(file, label, drawn, key) for key in ("length", "vocabulary"))
        return Prompt(ids=random_ids(seed, length, vocabulary), vocabulary=vocabulary)
    ids = table["ids"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise wrong(file, label, "ids", "a list of token ids belongs here")
    for key in ("text", "chat"):
        if key in table and not isinstance(table[key], str):
            raise wrong(file, label, key, "a string belongs here")
    return Prompt(ids=tuple(ids), text=table.get("text"), chat=table.get("chat"))
