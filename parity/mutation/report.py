"""What was found of seeded faults, for programs and for people: JSON, Markdown, and lines for a terminal.

Guarantees: every figure is counted from the outcomes; nothing depends on the day, the machine's speed or the number of
processes, so equal runs give equal files.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from parity.atomic_file import write_atomically
from parity.errors import lay_out
from parity.mutation.fault import KINDS
from parity.mutation.run import Mutation
from parity.mutation.trial import Fate, Outcome

JSON_FILE: Final = "mutation.json"
MARKDOWN_FILE: Final = "mutation.md"
COLUMNS: Final = ("kind", "faults", "caught", "localised", "seen after")


def to_json(mutation: Mutation) -> dict[str, Any]:
    """What `assay mutate --json` prints; the first five keys are a contract."""
    return {
        "total": len(mutation.outcomes),
        "caught": len(mutation.caught),
        "localised": len(mutation.localised),
        "false_alarms": len(mutation.false_alarms),
        "holes": [outcome.fault for outcome in mutation.holes],
        "module_faults": len(mutation.in_modules),
        "module_localised": sum(outcome.localised for outcome in mutation.in_modules),
        "void": [outcome.fault for outcome in mutation.void],
        "misplaced": [outcome.fault for outcome in mutation.misplaced],
        "clean_runs": len(mutation.outcomes),
        "faults": [_fault(outcome) for outcome in mutation.outcomes],
    }


def save(mutation: Mutation, folder: Path) -> None:
    """Write both files, each whole or not at all."""
    described = to_json(mutation)
    faults = described.pop("faults")
    head = json.dumps(described, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(fault)}" for fault in faults)
    write_atomically(folder / JSON_FILE, f'{head},\n "faults": [\n{rows}\n ]\n}}\n'.encode())
    write_atomically(folder / MARKDOWN_FILE, markdown(mutation).encode())


def summary(mutation: Mutation) -> list[tuple[str, ...]]:
    """A row a kind: how many, caught, localised, and after how many rows, draws or tokens they were seen."""
    rows: list[tuple[str, ...]] = []
    for kind in KINDS:
        members = [outcome for outcome in mutation.outcomes if outcome.kind == kind]
        if members:
            caught = sum(outcome.fate is Fate.CAUGHT for outcome in members)
            localised = sum(outcome.localised for outcome in members)
            rows.append((kind, str(len(members)), str(caught), str(localised), _steps(members)))
    return rows


def closing(mutation: Mutation) -> str:
    """One line: `4 faults: 4 caught, 3 localised (75.0 %), of modules 2 of 3 (66.7 %); 4 clean runs, 0 false alarms`."""
    total, caught, localised = len(mutation.outcomes), len(mutation.caught), len(mutation.localised)
    others = [f", {len(found)} {word}" for word, found in _others(mutation) if found]
    share = f"{100 * localised / total:.1f} %" if total else "-"
    alarms = len(mutation.false_alarms)
    modules = mutation.in_modules
    placed = sum(outcome.localised for outcome in modules)
    in_modules = f", of modules {placed} of {len(modules)} ({100 * placed / len(modules):.1f} %)" if modules else ""
    return (
        f"{total} {'fault' if total == 1 else 'faults'}: {caught} caught, {localised} localised ({share})"
        f"{in_modules}{''.join(others)}; "
        f"{total} clean {'run' if total == 1 else 'runs'}, {alarms} false {'alarm' if alarms == 1 else 'alarms'}"
    )


def messages(mutation: Mutation) -> list[str]:
    """What happened, aligned facts and the next command, for every fault that is not as it must be."""
    return [
        *(
            _message(o, "was seen by no case", "a case that sees it: parity/cases, assay record")
            for o in mutation.holes
        ),
        *(_message(o, "is none", "mend parity/mutation/catalogue", why=o.why) for o in mutation.void),
        *(
            _message(o, "was seen first elsewhere", "correct where it is, or declare why it is hidden", found=_found(o))
            if not o.hidden
            else _message(
                o, "was localised, though it is declared to be hidden", "take the reason out", hidden=o.hidden
            )
            for o in mutation.misplaced
        ),
        *(
            _message(o, "had a control that differs", f"assay check '{o.control.case}'", control=_said(o))
            for o in mutation.false_alarms
        ),
    ]


def markdown(mutation: Mutation) -> str:
    """The report: counts by kind, what is not as it must be, and every fault."""
    lines = [
        "# Seeded faults",
        "",
        "Each fault is planted in the engine while it runs, one at a time; the committed goldens must see it, first where it",
        "is. The same case is run once more without the fault. Written by `assay mutate`.",
        "",
        f"**{closing(mutation)}**",
        "",
        *_table(COLUMNS, summary(mutation)),
    ]
    for title, outcomes in (
        ("Holes", mutation.holes),
        ("No faults", mutation.void),
        ("Misplaced", mutation.misplaced),
        ("False alarms", mutation.false_alarms),
    ):
        if outcomes:
            rows = [(o.fault, o.says, o.at, _found(o), o.why or o.control.case) for o in outcomes]
            lines += ["", f"## {title}", "", *_table(("fault", "what is wrong", "where", "found", "said"), rows)]
    if hidden := [o for o in mutation.outcomes if o.hidden and not o.misplaced]:
        whys = [(o.fault, o.at, _found(o), o.hidden) for o in hidden]
        lines += ["", "## Caught, and not localised", "", *_table(("fault", "where", "found", "why"), whys)]
    rows = [(o.fault, o.says, o.at, o.seen.case if o.seen else "-", _after(o)) for o in mutation.outcomes]
    lines += ["", "## All faults", "", *_table(("fault", "what is wrong", "where", "seen by", "after"), rows)]
    return "\n".join(lines) + "\n"


def _fault(outcome: Outcome) -> dict[str, object]:
    seen = outcome.seen
    return {
        "fault": outcome.fault,
        "kind": outcome.kind,
        "says": outcome.says,
        "at": outcome.at,
        "fate": outcome.fate.value,
        "case": seen and seen.case,
        "status": seen and seen.status,
        "steps": seen and seen.steps,
        "found": seen and seen.found,
        "localised": outcome.localised,
        "hidden": outcome.hidden or None,
        "false_alarm": outcome.false_alarm,
        "why": outcome.why or None,
    }


def _message(outcome: Outcome, what: str, next_step: str, **facts: object) -> str:
    told = {"says": outcome.says, "where": outcome.at, "asked": f"{outcome.asked} cases", **facts, "next": next_step}
    return lay_out(f"fault {outcome.fault} {what}", told)


def _others(mutation: Mutation) -> Iterable[tuple[str, tuple[Outcome, ...]]]:
    return (("holes", mutation.holes), ("void", mutation.void), ("misplaced", mutation.misplaced))


def _found(outcome: Outcome) -> str:
    return outcome.seen.found if outcome.seen else "-"


def _said(outcome: Outcome) -> str:
    return f"{outcome.control.case}: {outcome.control.status}, {outcome.control.found}"


def _after(outcome: Outcome) -> str:
    return "-" if outcome.seen is None or outcome.seen.steps is None else str(outcome.seen.steps)


def _steps(outcomes: list[Outcome]) -> str:
    """The fewest and the most steps."""
    steps = [o.seen.steps for o in outcomes if o.seen is not None and o.seen.steps is not None]
    if not steps:
        return "-"
    return str(steps[0]) if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [columns, tuple("---" for _ in columns), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
