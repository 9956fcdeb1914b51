"""`assay diff EXPECTED ACTUAL`: compare two traces, goldens or foreign goldens, step by step."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from parity.compare import Match, TensorDiff
from parity.console import aligned, show
from parity.distribution import RowDistance
from parity.errors import UsageError
from parity.foreign import is_foreign, load_foreign, widened
from parity.golden import Golden
from parity.golden_view import rows_at_hand
from parity.tensor import Tensor
from parity.trace import Trace, logits_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two.

    Attributes:
        label: What it is, for people.
        digests: Tensor name to SHA-256, in execution order.
        tensors: Those whose bits are at hand.
        token_ids: The id that follows each row.
        wide: Rows were widened to F32 by whoever wrote them.
        absent: Rows that it speaks of and that are not on disk.
    """

    label: str
    digests: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    token_ids: tuple[int, ...]
    wide: bool = False
    absent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor on both sides; numbers are None where a side has its digest alone."""

    name: str
    match: Match
    diff: TensorDiff | None = None
    distance: RowDistance | None = None

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        diff, distance = self.diff, self.distance
        return {
            "tensor": self.name,
            "match": self.match.value,
            "num_different": diff and diff.num_different,
            "num_elements": diff and diff.num_elements,
            "first": diff and diff.first,
            "max_ulp": diff and diff.max_ulp,
            "kl": distance and distance.kl,
            "top1_agrees": distance and distance.top1_agrees,
            "flips": distance and distance.flips,
        }


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the verb."""
    parser = subparsers.add_parser(
        "diff",
        help="compare two traces, goldens or foreign goldens",
        description="Compare a trace folder, a golden (.json) or a foreign golden (PREFIX-parity.json) with another. "
        "Exit code 0: identical; 1: not.",
    )
    parser.add_argument("expected", type=Path, metavar="EXPECTED", help="what is believed")
    parser.add_argument("actual", type=Path, metavar="ACTUAL", help="what is judged")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print a line a tensor, decide."""
    expected, actual = alike(load_side(args.expected), load_side(args.actual))
    rows = compare(expected, actual)
    missing = [name for name in expected.digests if name not in actual.digests]
    extra = [name for name in actual.digests if name not in expected.digests]
    ids = [s for s, (a, b) in enumerate(zip(expected.token_ids, actual.token_ids, strict=False)) if a != b]
    equal = all(row.match is Match.IDENTICAL for row in rows) and not (missing or extra or ids)
    if args.json:
        described = {
            "expected": expected.label,
            "actual": actual.label,
            "identical": equal,
            "rows": [row.to_json() for row in rows],
            "missing": missing,
            "extra": extra,
            "first_token_id_step": ids[0] if ids else None,
        }
        print(json.dumps(described))
    else:
        _print(expected, actual, rows, {"missing": missing, "extra": extra}, ids, equal=equal)
    return 0 if equal else 1


def load_side(path: Path) -> Side:
    """Read whatever `path` names.

    Raises:
        UsageError: It is nothing that can be compared.
        AssayError: It is, and cannot be believed.
    """
    if path.is_dir() and (path / "trace.json").exists():
        trace = Trace.load(path)
        digests = {name: tensor.digest for name, tensor in trace.tensors.items()}
        return Side(label=f"trace {path.name}", digests=digests, tensors=trace.tensors, token_ids=trace.token_ids)
    if is_foreign(path):
        foreign = load_foreign(path)
        tensors = {logits_name(step): row for step, row in enumerate(foreign.rows)}
        label = (
            f"foreign golden {foreign.name} of {foreign.model}, {len(foreign.rows)} of {foreign.promised} rows on disk"
        )
        digests = {name: tensor.digest for name, tensor in tensors.items()}
        absent = foreign.promised - len(foreign.rows)
        return Side(
            label=label, digests=digests, tensors=tensors, token_ids=foreign.token_ids, wide=True, absent=absent
        )
    if path.suffix == ".json" and path.is_file():
        golden = Golden.load(path)
        label = f"golden {golden.case.name} of {golden.case.oracle}"
        return Side(label=label, digests=golden.digests, tensors=rows_at_hand(golden), token_ids=golden.token_ids)
    raise UsageError(
        f"{path} is nothing that can be compared",
        known="a folder with trace.json, a golden's .json, a foreign PREFIX-parity.json",
        next_step="assay check PATTERN --traces DIR makes trace folders",
    )


def alike(expected: Side, actual: Side) -> tuple[Side, Side]:
    """Both as they are, or where one of them is foreign the rows of both, widened to F32 as that format has them."""
    return (expected, actual) if expected.wide == actual.wide else (_only_logits(expected), _only_logits(actual))


def compare(expected: Side, actual: Side) -> tuple[Row, ...]:
    """Compare the tensors that both sides name, in the order of `expected`.

    Raises:
        UsageError: They have none in common.
    """
    names = [name for name in expected.digests if name in actual.digests]
    if not names:
        raise UsageError(
            "the two have no tensor in common",
            expected=", ".join(list(expected.digests)[:3]) or "nothing",
            actual=", ".join(list(actual.digests)[:3]) or "nothing",
            next_step="compare two runs of the same kind",
        )
    return tuple(_row(name, expected, actual) for name in names)


def _row(name: str, expected: Side, actual: Side) -> Row:
    want, got = expected.tensors.get(name), actual.tensors.get(name)
    if want is None or got is None:
        same = expected.digests[name] == actual.digests[name]
        return Row(name=name, match=Match.IDENTICAL if same else Match.DIFFERENT)
    diff = TensorDiff.of(want, got)
    described = diff.match is not Match.INCOMPARABLE and name.startswith("logits/")
    return Row(name=name, match=diff.match, diff=diff, distance=RowDistance.of(want, got) if described else None)


def _only_logits(side: Side) -> Side:
    """Rows whose bits are at hand; widening is exact, and the foreign format knows no other tensors."""
    tensors = {name: widened(tensor) for name, tensor in side.tensors.items() if name.startswith("logits/")}
    digests = {name: tensor.digest for name, tensor in tensors.items()}
    return replace(side, digests=digests, tensors=tensors, wide=True)


def _print(
    expected: Side,
    actual: Side,
    rows: tuple[Row, ...],
    lacking: Mapping[str, list[str]],
    ids: list[int],
    *,
    equal: bool,
) -> None:
    console = Console()
    show(console, f"expected  {expected.label}")
    show(console, f"actual    {actual.label}")
    table = [("tensor", "match", "different", "max ULP", "KL", "top-1", "flips")]
    for line in aligned(table + [_cells(row) for row in rows]):
        show(console, line)
    for what, names in lacking.items():
        if names:
            show(console, f"{what:<8}  {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")
    if ids:
        step = ids[0]
        show(
            console,
            f"token ids part at step {step}: expected {expected.token_ids[step]}, actual {actual.token_ids[step]}",
        )
    bad = next((row for row in rows if row.match is not Match.IDENTICAL), None)
    if bad is not None and bad.diff is not None and bad.diff.first is not None:
        show(console, f"first     {bad.name} {bad.diff.at_first()}")
    if bad is not None and bad.match is Match.INCOMPARABLE and bad.diff is not None:
        show(console, f"first     {bad.name}: expected {bad.diff.expected_kind}, actual {bad.diff.actual_kind}")
    absent = max(expected.absent, actual.absent)
    limit = f" as far as rows are on disk; {absent} are not" if absent and equal else ""
    show(console, ("bit-identical" if equal else "not bit-identical") + limit)


def _cells(row: Row) -> tuple[str, ...]:
    diff, distance = row.diff, row.distance
    counted = f"{diff.num_different} of {diff.num_elements}" if diff and diff.num_elements else "-"
    ulp = "-" if diff is None or diff.max_ulp is None else str(diff.max_ulp)
    if distance is None:
        return (row.name, row.match.value, counted, ulp, "-", "-", "-")
    top = "agrees" if distance.top1_agrees else f"{distance.expected_top} -> {distance.actual_top}"
    return (row.name, row.match.value, counted, ulp, f"{distance.kl:.3g}", top, f"{distance.flips} of {distance.k}")
