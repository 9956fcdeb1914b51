"""Explaining one case: two runners, and the place, position and cause of what tells them apart.

Guarantees: nothing is compared but traces; a statement about a shorter prompt or another KV mode is made only of runs that were
done. Works on any two runners of one case: an oracle and an engine, two versions, an engine and itself with a fault planted.
"""

from dataclasses import dataclass, replace
from typing import Literal

from parity.case import KV, Case
from parity.compare import TensorDiff
from parity.distribution import RowDistance
from parity.errors import CaseError
from parity.explaining.cause import Cause, Sighting, cause_of
from parity.explaining.position import Shortest, shortest_prompt
from parity.localize import Place, localize
from parity.snapshot import Snapshot
from parity.trace import TOKEN_IDS, Runner, Trace
from parity.truth.model import Truth, open_truth
from parity.truth.packing import packing_of
from parity.truth.weights import NoTruthError

Conversion = Literal["before", "after"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What tells two runs of a case apart.

    Attributes:
        case: The question.
        record: Which modules were compared, as shell globs.
        expected_name: What reports call the expected side, such as `mlx-lm 0.32.2`.
        place: Where the traces of the whole case part; None where they hold the same bits.
        origin: Where the difference begins: at the first position that differs, which may lie before the recorded one.
        position: That position, counted from 0 over prompt and steps; None where it was not looked for.
        conversion: Whether the difference begins before keys and values are packed, or after; None where they never are.
        cause: Why.
        row: How far apart the first differing rows of logits are; None where all rows agree.
        described: Message lines on the first differing row: `first` and `count`.
        shortest: The shortest prompt that differs, where one was looked for and found.
    """

    case: Case
    expected_name: str
    record: tuple[str, ...] = ("*",)
    place: Place | None = None
    origin: Place | None = None
    position: int | None = None
    conversion: Conversion | None = None
    cause: Cause | None = None
    row: RowDistance | None = None
    described: tuple[str, str] | None = None
    shortest: Shortest | None = None

    @property
    def identical(self) -> bool:
        """Whether there is nothing to explain."""
        return self.place is None

    @property
    def module(self) -> str | None:
        """Path of the module in which the difference begins."""
        return None if self.origin is None else self.origin.module

    @property
    def inputs_identical(self) -> bool:
        """Whether all that goes into that module is known to agree: what ran before it, and every earlier position."""
        if self.origin is None:
            return False
        return self.origin.inputs_identical and (self.position is not None)


def explain(
    case: Case,
    snapshot: Snapshot,
    expected: Runner,
    actual: Runner,
    *,
    record: tuple[str, ...] = ("*",),
    first_step: int | None = None,
    truth: Truth | str | None = None,
) -> Explanation:
    """Explain a case.

    Args:
        case: Any case of logits; what it records itself does not matter.
        snapshot: What both sides run.
        expected: The oracle, or what stands for it.
        actual: The engine, or what stands for it.
        record: Shell globs over the module paths to compare; every one by default, which an oracle refuses where a module runs
            twice in a forward.
        first_step: The first step that differs, where the judge has found it already; later ones are not run.
        truth: Of the snapshot in the case's dtype, or why there is none; opened here where absent.

    Raises:
        CaseError: The case draws from given rows: there is no model in it.
        OracleError, EngineError: A side refuses.
    """
    _refuse(case)
    width = head_width(snapshot)
    steps = case.num_steps if first_step is None else first_step + 1
    asked = replace(case, record=record, num_steps=steps, forced_ids=case.forced_ids and case.forced_ids[:steps])
    want, got = expected.run(asked, snapshot), actual.run(asked, snapshot)
    place = localize(want, got, head_width=width)
    name = expected.name
    if place is None:
        return Explanation(case=case, expected_name=name, record=record)
    seen = Sighting(place=place, expected=want, actual=got, ids=(*case.prompt_ids, *want.token_ids[: place.step]))
    conversion: Conversion | None = None
    if case.kv.packs:
        unpacked = _unpacked(asked, want, snapshot, expected, actual)
        conversion = "before" if unpacked is not None and unpacked.place.step <= place.step else "after"
        seen = unpacked if unpacked is not None and conversion == "before" else seen
    first, shortest = seen, None
    if seen.place.step == 0 and seen.place.module != TOKEN_IDS and conversion != "after":
        plain = replace(asked, kv=_kept(asked.kv))
        shortest = shortest_prompt(plain, snapshot, expected, actual, head_width=width)
        if shortest is not None:
            first = shortest.sighting
    if truth is None:
        truth = _truth(snapshot, replace(asked, kv=_kept(asked.kv)) if conversion == "before" else asked)
    distance, described = _first_row(want, got)
    return Explanation(
        case=case,
        expected_name=name,
        record=record,
        place=place,
        origin=first.place,
        position=len(first.ids) - 1,
        conversion=conversion,
        cause=cause_of(seen, first, truth),
        row=distance,
        described=described,
        shortest=shortest,
    )


def head_width(snapshot: Snapshot) -> int | None:
    """Elements of a head, from config.json or its text part; None where it does not say."""
    config = {**snapshot.config, **snapshot.config.get("text_config", {})}
    if width := config.get("head_dim"):
        return int(width)
    heads, whole = config.get("num_attention_heads"), config.get("hidden_size")
    return int(whole) // int(heads) if heads and whole else None


def _refuse(case: Case) -> None:
    """Refuse a case whose modules nobody can watch."""
    if case.sampling is not None:
        raise CaseError(
            f"{case.name} has no model to look into",
            kind="a sampler case: its rows are given, its uniforms are in the golden",
            next_step=f"assay check '{case.name}', which names the draw and says whether the randomness agreed",
        )
    if case.batch is not None:
        raise CaseError(
            f"{case.name} runs several sequences at once, whose modules are not recorded",
            kind="a batch case",
            next_step=f"assay check '{case.name}', which names the sequence; explain a case of one sequence",
        )


def _unpacked(case: Case, want: Trace, snapshot: Snapshot, expected: Runner, actual: Runner) -> Sighting | None:
    """The first difference of the same case, led along the same ids, with keys and values as computed; None for none."""
    ids = want.token_ids if case.forced_ids is None else case.forced_ids
    plain = replace(case, kv=_kept(case.kv), forced_ids=ids)
    traces = expected.run(plain, snapshot), actual.run(plain, snapshot)
    place = localize(*traces, head_width=head_width(snapshot))
    if place is None:
        return None
    return Sighting(place=place, expected=traces[0], actual=traces[1], ids=(*case.prompt_ids, *ids[: place.step]))


def _kept(kv: KV) -> KV:
    """The same caches, with keys and values as computed."""
    return KV(max_size=kv.max_size, keep=kv.keep)


def _truth(snapshot: Snapshot, case: Case) -> Truth | str:
    """The truth, or why there is none."""
    try:
        return open_truth(snapshot, case.dtype, packing=packing_of(case))
    except NoTruthError as error:
        return str(error)


def _first_row(want: Trace, got: Trace) -> tuple[RowDistance | None, tuple[str, str] | None]:
    for name, tensor in want.tensors.items():
        if name.startswith("logits/") and name in got.tensors and tensor.digest != got.tensors[name].digest:
            diff = TensorDiff.of(tensor, got.tensors[name])
            if diff.first is None:
                return None, None
            distance = RowDistance.of(tensor, got.tensors[name])
            return distance, (diff.at_first(), f"{diff.counted()}; {distance.described()}")
    return None, None
