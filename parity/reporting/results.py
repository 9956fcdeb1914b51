"""Results on disk: what `assay check` leaves for `assay report`, and where the other verbs' results lie beside it.

A folder, `reports/` of the checkout unless an option says otherwise, holds `check.json` (the last check), `bench*.json`,
`mutation.json`, `sweep.json` and `explain/<case>.json`. Guarantees: files appear whole or not at all; a file of another
format, or one that is no JSON object, is refused by name. A check replaces the result of the one before it as a whole, so
that no verdict of another day stands among today's; the pattern that it was asked for is kept with it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from parity.atomic_file import write_atomically
from parity.compare import TensorDiff, written
from parity.errors import UsageError
from parity.matrix import Place
from parity.provenance import Provenance
from parity.verdict import Verdict, counts

FORMAT: Final = 1
RESULTS: Final = Path(__file__).resolve().parents[2] / "reports"
CHECK: Final = "check.json"

Json = dict[str, Any]


def check_result(
    verdicts: tuple[Verdict, ...], *, pattern: str | None, left_out: str | None, places: Mapping[str, Place]
) -> Json:
    """Everything that a check found, as plain values.

    Args:
        verdicts: In their order.
        pattern: The glob that chose the cases, if one did.
        left_out: What was said of cases that were left out, if any were.
        places: Case name to where it is written.
    """
    grounds: list[Json] = []
    return {
        "format": FORMAT,
        "pattern": pattern,
        "left_out": left_out,
        "counts": counts(verdicts),
        "cases": [_described(verdict, places.get(verdict.name), grounds) for verdict in verdicts],
        "provenance": grounds,
    }


def save_check(folder: Path, result: Json) -> Path:
    """Write `check.json`; returns its path.

    Raises:
        UsageError: The folder cannot be written.
    """
    file = folder / CHECK
    fields = [f" {json.dumps(name)}: {_lines(value)}" for name, value in result.items()]
    try:
        write_atomically(file, ("{\n" + ",\n".join(fields) + "\n}\n").encode())
    except OSError as error:
        raise UsageError(
            "the result of the check cannot be kept",
            folder=folder,
            reason=error.strerror,
            next_step="give --results a folder that can be written",
        ) from error
    return file


def save_explained(folder: Path, explained: Json) -> Path:
    """Keep what an explanation of one case says; returns the file's path.

    Args:
        folder: Of results.
        explained: Plain values: `case`, its name; `cause`, in words with the evidence; `earliest`, a module path; and more.
    """
    file = folder / "explain" / f"{explained['case']}.json"
    write_atomically(file, json.dumps(explained, indent=1, allow_nan=False).encode() + b"\n")
    return file


def load_check(folder: Path) -> Json | None:
    """The last check's result; None where there is none.

    Raises:
        UsageError: The file is of another format, or no result.
    """
    result = load(folder / CHECK)
    if result is not None and result.get("format") != FORMAT:
        raise _refused(folder / CHECK, f"format {result.get('format')!r} where this version reads {FORMAT}")
    return result


def load(file: Path) -> Json | None:
    """A result file; None where there is none.

    Raises:
        UsageError: It holds no JSON object.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _refused(file, f"not JSON: {error}") from error
    if not isinstance(result, dict):
        raise _refused(file, f"a {type(result).__name__} where an object belongs")
    return result


def _lines(value: object) -> str:
    """JSON with a line for each element of a list, so that a case can be found with grep."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(element, allow_nan=False)}" for element in value) + "\n ]"
    return json.dumps(value, allow_nan=False)


def _described(verdict: Verdict, place: Place | None, grounds: list[Json]) -> Json:
    """One case: the promised keys of `--json`, and what a section of the report shows beside them."""
    case = verdict.case
    return {
        **verdict.to_json(),
        "snapshot": case and case.snapshot,
        "feed": case and case.feed.name,
        "forced": None if case is None else case.forced_ids is not None,
        "passes": verdict.passes,
        "place": place and {"file": f"parity/cases/{place.file}", "line": place.line},
        "what": verdict.what,
        "facts": {name: str(value) for name, value in verdict.facts.items()},
        "next": verdict.next_step,
        "num_differing": len(verdict.differing),
        "tensors": [_tensor(name, verdict.diffs.get(name)) for name in verdict.differing if _kept(name, verdict)],
        "rows": [row.to_json() for row in verdict.rows],
        "judged": _numbered(verdict.judged, grounds),
        "believed": _numbered(verdict.believed, grounds),
    }


def _kept(name: str, verdict: Verdict) -> bool:
    """Activations of later steps differ because earlier ones do; they are counted and not described."""
    return not name.startswith("activations/") or name.startswith(f"activations/{verdict.first_step}/")


def _tensor(name: str, diff: TensorDiff | None) -> Json:
    """A tensor that differs; nulls where its expected bits were not at hand."""
    known = diff is not None and diff.expected_bits is not None and diff.actual_bits is not None
    return {
        "name": name,
        "num_elements": diff and diff.num_elements,
        "num_different": diff and diff.num_different,
        "max_ulp": diff and diff.max_ulp,
        "first": diff and diff.first and list(diff.first),
        "expected": written(diff.dtype, diff.expected_bits) if known else None,  # type: ignore[union-attr, arg-type]
        "actual": written(diff.dtype, diff.actual_bits) if known else None,  # type: ignore[union-attr, arg-type]
        "ulp_histogram": [[ulp, count] for ulp, count in diff.ulp_histogram.items()] if diff else [],
    }


def _numbered(provenance: Provenance | None, grounds: list[Json]) -> int | None:
    """The index of a provenance among those met so far; thousands of cases share a few."""
    if provenance is None:
        return None
    ground = provenance.to_json()
    if ground not in grounds:
        grounds.append(ground)
    return grounds.index(ground)


def _refused(file: Path, reason: str) -> UsageError:
    return UsageError(
        "a result file cannot be read",
        file=f"{file.parent.name}/{file.name}",
        reason=reason,
        next_step="remove it and run the verb that writes it again",
    )
