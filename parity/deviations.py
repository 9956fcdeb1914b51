"""Known deviations of oracles: differences with a reason and evidence, listed in `deviations.toml`.

Guarantees: an entry only ever turns DIFFERENT into KNOWN_DEVIATION, and IDENTICAL into FIXED, which fails; no other
verdict changes. An entry that no case matches fails the gate, so the list cannot outlive its reasons. Faults of the
engine have no place here: they are mended.

The same file holds facts about oracles that excuse nothing: where one departs from a config, from its own documentation or from
the published model, and the engine with it, because L1 is the oracle. Each has a small run of the oracle alone that shows it
(`python -m oracles.facts`), and fails there once it no longer holds.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, get_args

from parity.errors import CaseError
from parity.verdict import Status, Verdict

DEVIATIONS: Final = Path(__file__).parent / "deviations.toml"
Side = Literal["oracle", "mlx"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One known deviation.

    Attributes:
        pattern: Shell glob over case names.
        side: Who is wrong.
        reason: What is computed, and what should be.
        evidence: The command or test that shows it.
        link: Where it was reported.
    """

    pattern: str
    side: Side
    reason: str
    evidence: str
    link: str

    def matches(self, name: str) -> bool:
        """Whether a case falls under it."""
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleFact:
    """What an oracle is known to do otherwise than it should.

    Attributes:
        name: Of the function or entry in `oracles/<oracle>/facts.py` that shows it.
        oracle: Name in `oracles/registry.toml`.
        version: In which it was reproduced; another one in the registry makes the fact stale.
        side: Who is wrong: the oracle, or mlx below it.
        what: What is computed.
        right: What should be.
        link: Where it was reported; `not reported` where it was not.
    """

    name: str
    oracle: str
    version: str
    side: Side
    what: str
    right: str
    link: str


def load_deviations(file: Path = DEVIATIONS) -> tuple[Deviation, ...]:
    """Read the list.

    Raises:
        CaseError: It is not TOML, or an entry has a field too many, too few, empty or of another kind.
    """
    entries, _ = _read(file)
    return tuple(Deviation(**_checked(file, "deviation", Deviation, n, entry)) for n, entry in enumerate(entries, 1))


def load_oracle_facts(file: Path = DEVIATIONS) -> tuple[OracleFact, ...]:
    """Read what is known of the oracles.

    Raises:
        CaseError: As `load_deviations`; or two facts of an oracle have one name.
    """
    _, entries = _read(file)
    facts = [OracleFact(**_checked(file, "oracle_fact", OracleFact, n, entry)) for n, entry in enumerate(entries, 1)]
    names = [(fact.oracle, fact.name) for fact in facts]
    for number, name in enumerate(names, 1):
        if name in names[: number - 1]:
            raise _wrong(file, f"[[oracle_fact]] {number}", f"{name[0]} has two facts named {name[1]}")
    return tuple(facts)


def apply(deviations: Iterable[Deviation], verdict: Verdict) -> Verdict:
    """Hold a verdict against the list; the first entry that matches the case counts."""
    if verdict.status not in (Status.DIFFERENT, Status.IDENTICAL):
        return verdict
    entry = next((d for d in deviations if d.matches(verdict.name)), None)
    if entry is None:
        return verdict
    known = {"pattern": entry.pattern, "side": entry.side, "reason": entry.reason, "evidence": entry.evidence}
    if verdict.status is Status.IDENTICAL:
        return replace(
            verdict,
            status=Status.FIXED,
            what=f"{verdict.name} is listed as a known deviation and is bit-identical",
            facts={**known, "link": entry.link},
            next_step="remove the entry from parity/deviations.toml, or narrow its pattern",
        )
    return replace(
        verdict,
        status=Status.KNOWN_DEVIATION,
        what=f"{verdict.name} differs as known",
        facts={**verdict.facts, **known, "link": entry.link},
        next_step="",
    )


def unmatched(deviations: Iterable[Deviation], names: Iterable[str]) -> tuple[Verdict, ...]:
    """A failing verdict for every entry that matches no case.

    Args:
        deviations: The list.
        names: Names of all cases, not of the selected ones alone.
    """
    known = tuple(names)
    return tuple(
        Verdict(
            name=f"deviations.toml/{entry.pattern}",
            status=Status.ERROR,
            what=f"the known deviation {entry.pattern!r} matches no case",
            facts={"reason": entry.reason},
            next_step="correct its pattern in parity/deviations.toml, or remove the entry",
        )
        for entry in deviations
        if not any(entry.matches(name) for name in known)
    )


_MEND: Final = "correct it in parity/deviations.toml"


def _read(file: Path) -> tuple[list[object], list[object]]:
    """The entries of the two kinds, as they stand."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError(
            "the list of deviations cannot be read", file=file.name, reason=error, next_step=_MEND
        ) from error
    deviations, facts = raw.pop("deviation", []), raw.pop("oracle_fact", [])
    if raw or not isinstance(deviations, list) or not isinstance(facts, list):
        reason = f"unknown {', '.join(raw)}" if raw else "write [[deviation]] and [[oracle_fact]] tables"
        raise _wrong(file, "top level", reason)
    return deviations, facts


def _checked(
    file: Path, kind: str, wanted: type[Deviation] | type[OracleFact], number: int, entry: object
) -> dict[str, Any]:
    """An entry with just the fields of its kind, each a sentence."""
    table = f"[[{kind}]] {number}"
    names = {field.name for field in fields(wanted)}
    if not isinstance(entry, dict) or set(entry) != names:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise _wrong(file, table, f"fields {found} where {sorted(names)} belong")
    if empty := sorted(k for k, v in entry.items() if not isinstance(v, str) or not v.strip()):
        raise _wrong(file, table, f"{', '.join(empty)} must be a sentence")
    if entry["side"] not in get_args(Side):
        raise _wrong(file, table, f"side {entry['side']!r} is neither oracle nor mlx: faults of the engine are mended")
    return entry


def _wrong(file: Path, table: str, reason: str) -> CaseError:
    return CaseError("a deviation is malformed", file=file.name, table=table, reason=reason, next_step=_MEND)
