"""What a trace must look like before it may become a golden.

Guarantees: an oracle's process is not believed about the shape of its own answer. Rows, ids, pins and switches are checked
against the case and the registry here, in the parent; nothing that fails becomes a golden.
"""

import numpy as np

from oracles.registry import Oracle
from parity.case import Case
from parity.errors import OracleError
from parity.logit_rows import generated_rows, rounded
from parity.provenance import Provenance
from parity.sampled_trace import UNIFORMS, XTC_UNIFORMS
from parity.sampling import MODEL
from parity.tensor import FLOATS
from parity.trace import TOKEN_IDS, Trace, logits_name

LOGIT_DTYPES = FLOATS - {"F64"}


def accept(case: Case, trace: Trace, provenance: Provenance, oracle: Oracle) -> None:
    """Check a trace against its case and the oracle's pins.

    Raises:
        OracleError: It does not answer the case, or was made with other versions than pinned.
    """
    reason = _rows(case, trace) or _ids(case, trace) or _draws(case, trace) or _pins(provenance, oracle)
    if reason:
        raise OracleError(
            f"oracle {oracle.name} {oracle.version} gave no usable trace",
            case=case.name,
            reason=reason,
            next_step="correct the case, or the oracle's runner in oracles/",
        )


def _rows(case: Case, trace: Trace) -> str | None:
    named = [name for name in trace.tensors if name.startswith("logits/")]
    if named != [logits_name(step) for step in range(case.num_rows)]:
        return f"{len(named)} rows of logits for {case.num_rows} steps"
    first = trace.logits(0)
    for step in range(case.num_rows):
        row = trace.logits(step)
        if row.dtype not in LOGIT_DTYPES or len(row.shape) != 2 or row.shape[0] != 1 or row.shape != first.shape:
            return f"row {step} is {row.dtype}{list(row.shape)}, row 0 is {first.dtype}{list(first.shape)}"
        if np.isnan(row.values()).any():
            return f"row {step} holds NaN"
    return None


def _ids(case: Case, trace: Trace) -> str | None:
    if TOKEN_IDS not in trace.tensors or len(trace.token_ids) != case.num_ids:
        return f"not one token id a step ({case.num_ids} steps)"
    if case.forced_ids is not None and trace.token_ids != case.forced_ids:
        return f"forced ids were not followed: {trace.token_ids}"
    vocabulary = trace.logits(0).shape[1]
    if any(not 0 <= token < vocabulary for token in trace.token_ids):
        return f"a token id lies outside the {vocabulary} logits of a row"
    return None


def _draws(case: Case, trace: Trace) -> str | None:
    """Of a sampler case: the rows are those that it names, and the uniforms are all there."""
    if case.sampling is None:
        return None
    wanted: dict[str, tuple[int, ...]] = {}
    if not case.sampling.greedy:
        wanted[UNIFORMS] = (case.num_steps, case.sampling.batch)
    if case.sampling.xtc:
        wanted[XTC_UNIFORMS] = (case.num_steps,)
    found = {name: trace.tensors[name].shape for name in (UNIFORMS, XTC_UNIFORMS) if name in trace.tensors}
    if found != wanted:
        return f"uniforms {found} where {wanted} belong"
    if case.sampling.rows != MODEL:
        rows = rounded(generated_rows(case.sampling.rows, case.num_rows), case.dtype)
        if any(trace.logits(step).digest != row.digest for step, row in enumerate(rows)):
            return f"its rows are not those that {case.sampling.rows!r} names"
    return None


def _pins(provenance: Provenance, oracle: Oracle) -> str | None:
    found = {name: provenance.packages.get(name) for name in oracle.pins}
    if found != oracle.pins:
        return f"made with {found}, pinned are {dict(oracle.pins)}"
    return None
