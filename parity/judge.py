"""The judge: one golden, one trace, one verdict.

Guarantees: digests decide, in execution order, and nothing else does; no tolerance, no option softens it. Where digests
differ, full tensors or, failing those, the golden's sketch *describe* the difference. A golden that answers another
question, or was made on other ground, is stale and is not compared. Nothing here runs a model.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from parity.case import Case
from parity.compare import TensorDiff, kind, ulp_distance
from parity.distribution import RowDistance, top1_described
from parity.golden import Golden
from parity.provenance import Provenance
from parity.row_difference import RowDifference
from parity.sampled_trace import UNIFORMS, XTC_UNIFORMS
from parity.sketch import gather, strided_ids, top_ids
from parity.snapshot import Snapshot
from parity.tensor import FLOATS, Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name
from parity.verdict import Status, Verdict

RowSource = Callable[[], Mapping[str, Tensor] | None]
MLX: Final = ("mlx", "mlx-cpu", "mlx-metal")


def judge(
    case: Case,
    golden: Golden,
    trace: Trace,
    *,
    snapshot: Snapshot,
    provenance: Provenance,
    stored_rows: RowSource | None = None,
) -> Verdict:
    """Judge a trace against a golden.

    Args:
        case: The question as it is asked today.
        golden: What the oracle answered.
        trace: What the engine answered.
        snapshot: The snapshot that the engine ran.
        provenance: What the trace's bits rest on.
        stored_rows: Full tensors of a golden that commits a sketch only, asked for once digests differ.
    """
    if stale := staleness(case, golden, snapshot=snapshot, provenance=provenance):
        return stale
    expected, actual = golden.digests, {name: tensor.digest for name, tensor in trace.tensors.items()}
    if facts := _incomparable(golden, trace):
        return Verdict(
            name=case.name,
            case=case,
            status=Status.INCOMPARABLE,
            what=f"trace of {case.name} cannot be compared with {oracle_name(golden)}",
            facts=facts,
            next_step="make the engine record what the case asks for, under the same names, dtypes and shapes",
            model_type=snapshot.config.get("model_type"),
        )
    differing = tuple(name for name in expected if expected[name] != actual[name])
    if not differing:
        return Verdict(
            name=case.name,
            case=case,
            status=Status.IDENTICAL,
            what=f"{case.name} is bit-identical to {oracle_name(golden)}",
            facts={"steps": case.num_steps, "tensors": len(expected)},
            model_type=snapshot.config.get("model_type"),
        )
    return _different(case, golden, trace, differing, snapshot=snapshot, provenance=provenance, rows=stored_rows)


def staleness(case: Case, golden: Golden, *, snapshot: Snapshot, provenance: Provenance) -> Verdict | None:
    """Say why a golden must not be compared at all, or None: its bits promise something about another run."""
    facts: dict[str, object] = {}
    if golden.case != case:
        old, new = golden.case.to_json(), case.to_json()
        facts["case"] = "\n".join(f"{key}: golden {old[key]}, case {new[key]}" for key in new if old[key] != new[key])
    if changed := _changed_files(golden.snapshot_files, snapshot.logit_files):
        facts["snapshot"] = "\n".join(changed)
    if golden.provenance.platform != provenance.platform:
        facts["platform"] = f"golden {golden.provenance.platform}, running {provenance.platform}"
    if golden.provenance.device != provenance.device:
        facts["device"] = f"golden {golden.provenance.device}, running {provenance.device}"
    for name in MLX:
        old_version, new_version = golden.provenance.packages.get(name), provenance.packages.get(name)
        if old_version != new_version:
            facts[name] = f"golden {old_version or 'without it'}, running {new_version or 'without it'}"
    if not facts:
        return None
    return Verdict(
        name=case.name,
        case=case,
        status=Status.STALE_GOLDEN,
        what=f"golden of {case.name} is stale",
        facts=facts,
        next_step=f"restore what changed, or assay record '{case.name}'",
        model_type=snapshot.config.get("model_type"),
    )


def oracle_name(golden: Golden) -> str:
    """`mlx-lm 0.32.2`: the oracle and the version that made the bits."""
    version = golden.provenance.packages.get(golden.case.oracle)
    return golden.case.oracle if version is None else f"{golden.case.oracle} {version}"


def _changed_files(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    names = sorted(set(expected) | set(actual))
    return [
        f"{name}: golden {expected.get(name, 'without it')}, on disk {actual.get(name, 'missing')}"
        for name in names
        if expected.get(name) != actual.get(name)
    ]


def _incomparable(golden: Golden, trace: Trace) -> dict[str, object]:
    """Facts on names, dtypes, shapes and cache kinds that do not fit; empty where all do."""
    expected = {entry.name: f"{entry.dtype}{list(entry.shape)}" for entry in golden.entries}
    actual = {name: kind(tensor) for name, tensor in trace.tensors.items()}
    wrong = [
        f"{n}: expected {expected[n]}, actual {actual[n]}"
        for n in expected
        if actual.get(n, expected[n]) != expected[n]
    ]
    facts: dict[str, object] = {
        "missing": _listed([name for name in expected if name not in actual]),
        "extra": _listed([name for name in actual if name not in expected]),
        "wrong": _listed(wrong),
    }
    if golden.cache != trace.cache:
        facts["cache"] = f"expected {', '.join(golden.cache) or 'none'}, actual {', '.join(trace.cache) or 'none'}"
    return {name: value for name, value in facts.items() if value}


def _different(
    case: Case,
    golden: Golden,
    trace: Trace,
    differing: tuple[str, ...],
    *,
    snapshot: Snapshot,
    provenance: Provenance,
    rows: RowSource | None,
) -> Verdict:
    tensors = golden.tensors if golden.form != "sketch" else (rows() if rows else None) or {}
    diffs = {name: TensorDiff.of(tensors[name], trace.tensors[name]) for name in differing if name in tensors}
    first = differing[0]
    logits = next((name for name in differing if name.startswith("logits/")), None)
    activation = next((name for name in differing if name.startswith("activations/")), None)
    if "/" not in first and TOKEN_IDS in differing:
        first = TOKEN_IDS  # uniforms describe a draw; its ids are what counts
    at = 0
    if first == TOKEN_IDS:
        pairs = zip(golden.token_ids, trace.token_ids, strict=True)
        at = next(step for step, (want, got) in enumerate(pairs) if want != got)
        first_step = at * case.num_steps // case.num_ids
    elif "/" in first:
        first_step = _step(first)
    else:
        first_step = (diffs[first].first or (0,))[0]
    shown = logits or first
    facts: dict[str, object] = {"step": f"{first_step} of {case.num_steps}", **_of_batch(case, first_step)}
    where = "" if "/" not in shown or _step(shown) == first_step else f"{shown} "
    if shown == TOKEN_IDS:
        facts["first"] = f"expected {golden.token_ids[at]}, actual {trace.token_ids[at]}"
        if case.sampling is not None:
            facts.update(_drawn(golden, trace, at, case.sampling.batch))
    elif shown in diffs:
        diff = diffs[shown]
        facts["first"] = where + diff.at_first()
        facts["count"] = diff.counted()
        if shown == logits:
            facts["count"] = f"{diff.counted()}; {RowDistance.of(tensors[shown], trace.tensors[shown]).described()}"
    elif shown == logits and golden.form == "sketch":
        facts["sketch"] = where + _against_sketch(golden, trace.tensors[shown], _step(shown))
    if golden.provenance.libc != provenance.libc:
        facts["C library"] = (
            f"golden {golden.provenance.libc}, running {provenance.libc}: tanh, erf and log1p may differ"
        )
    subject = "logits" if logits else {TOKEN_IDS: "token ids"}.get(shown, "activations" if activation else shown)
    return Verdict(
        name=case.name,
        case=case,
        status=Status.DIFFERENT,
        what=f"{subject} of {case.name} are not bit-identical to {oracle_name(golden)}",
        facts=facts,
        next_step=_explained(case),
        model_type=snapshot.config.get("model_type"),
        differing=differing,
        diffs=diffs,
        first_step=first_step,
        earliest=activation.split("/", 2)[2] if activation else None,
        rows=_rows(golden, trace, tensors) if logits else (),
    )


def _explained(case: Case) -> str:
    """The command that looks further; modules are watched in a case of one sequence that has a model."""
    if case.sampling is None and case.batch is None:
        return f"assay explain '{case.name}'"
    return f"assay check '{case.name}' --traces traces, then assay diff"


def _rows(golden: Golden, trace: Trace, tensors: Mapping[str, Tensor]) -> tuple[RowDifference, ...]:
    """Every row of logits on both sides, as far as the expected bits are at hand."""
    rows = []
    for step in range(golden.case.num_rows):
        name, actual = logits_name(step), trace.logits(step)
        if actual.shape[0] != 1:
            continue  # several sequences side by side: no one distribution
        if name in tensors or golden.digests[name] == actual.digest:
            rows.append(RowDifference.of(step, tensors.get(name, actual), actual))
        elif golden.form == "sketch":
            rows.append(RowDifference.against_sketch(step, golden.tensors, actual))
    return tuple(rows)


def _against_sketch(golden: Golden, actual: Tensor, step: int) -> str:
    """What the committed samples of a row say about how far off it is."""
    sampled = golden.tensors
    tops = sampled["top_ids"].values()[step].astype(np.int64)
    strides = strided_ids(actual.shape[-1])
    want = np.concatenate([sampled["top_values"].bits()[step], sampled["strided"].bits()[step]])
    got = np.concatenate([gather([actual], [ids]).bits()[0] for ids in (tops, strides)])
    ids, once = np.unique(np.concatenate([tops, strides]), return_index=True)  # a top logit may lie on a stride too
    want, got = want[once], got[once]
    differ = want != got
    text = f"{int(differ.sum())} of {ids.size} sampled elements differ"
    if differ.any() and actual.dtype in FLOATS:
        text += f", at most {int(ulp_distance(want[differ], got[differ]).max())} ULP"
    best = sampled["top_values"].values()[step]
    return f"{text}; {top1_described(int(tops[0]), int(top_ids(actual, 1)[0]), float(best[0] - best[1]))}"


def _of_batch(case: Case, row: int) -> dict[str, object]:
    """Of a batch case: whose row it is, and which of its own."""
    if case.batch is None:
        return {}
    sequence, step = case.batch.place(row)
    return {"sequence": f"{sequence} of {len(case.batch.steps)}, its step {step}"}


def _drawn(golden: Golden, trace: Trace, at: int, batch: int) -> dict[str, object]:
    """Facts on the draw of id `at` in a sampler case: the batch element, and whether the randomness agreed."""
    facts: dict[str, object] = {"element": f"{at % batch} of a batch of {batch}"}
    for name in (UNIFORMS, XTC_UNIFORMS):
        if name in golden.tensors:
            index = at if name == UNIFORMS else at // batch
            want, got = (t.values().reshape(-1)[index] for t in (golden.tensors[name], trace.tensors[name]))
            facts[name] = f"both {want!s}" if want == got else f"expected {want!s}, actual {got!s}"
    return facts


def _step(name: str) -> int:
    return int(name.split("/", 2)[1])


def _listed(names: list[str], limit: int = 5) -> str:
    """One a line, the rest counted."""
    more = [f"and {len(names) - limit} more"] if len(names) > limit else []
    return "\n".join(names[:limit] + more)
