"""A golden as something to look at: step by step the id that followed, its surprisal, the entropy, the likeliest ids.

Guarantees: float64, from stored bits. Where full rows are at hand figures are exact; where a golden commits a sketch alone the
entropy is an interval that holds the true one, and a figure that the sketch does not determine is None. Nothing is compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parity import row_store
from parity.distribution import log_softmax, top2_margin
from parity.errors import UsageError
from parity.golden import GOLDENS, Golden, golden_path
from parity.golden_folder import golden_version
from parity.matrix import load_cases, select
from parity.platform_key import platform_key
from parity.row_difference import SHOWN, Scored, finite, likeliest
from parity.sketch import strided_ids
from parity.tensor import Tensor
from parity.trace import logits_name


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One row of logits.

    Attributes:
        step: Counted from 0.
        token_id: The id that followed; None in a sampler case, where many were drawn from a row.
        surprisal: Of that id, in nats; None where the sketch does not hold it.
        entropy_low: Of the row, in nats: at least this.
        entropy_high: At most this; equal to `entropy_low` where the row is at hand.
        margin: Largest minus second largest logit.
        top: The likeliest ids, likeliest first.
    """

    step: int
    token_id: int | None
    surprisal: float | None
    entropy_low: float
    entropy_high: float
    margin: float
    top: tuple[Scored, ...]

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "step": self.step,
            "token_id": self.token_id,
            "surprisal": finite(self.surprisal),
            "entropy_low": finite(self.entropy_low),
            "entropy_high": finite(self.entropy_high),
            "margin": finite(self.margin),
            "top": [[one.token_id, finite(one.logprob)] for one in self.top],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenView:
    """What a golden says, row by row.

    Attributes:
        golden: The golden.
        exact: Whether full rows were at hand.
        steps: One a row; none where the golden neither holds its rows nor a sketch of them.
    """

    golden: Golden
    exact: bool
    steps: tuple[StepView, ...]

    @classmethod
    def of(cls, golden: Golden, rows: Mapping[str, Tensor] | None = None) -> "GoldenView":
        """Look at a golden.

        Args:
            golden: Any golden of batch 1.
            rows: Its tensors by name; by default what is on this machine.
        """
        tensors = rows_at_hand(golden) if rows is None else rows
        names = [logits_name(step) for step in range(golden.case.num_rows)]
        ids = golden.token_ids if golden.case.sampling is None else (None,) * len(names)
        if all(name in tensors for name in names):
            whole = tuple(
                _of_row(step, tensors[name], token) for step, (name, token) in enumerate(zip(names, ids, strict=True))
            )
            return cls(golden=golden, exact=True, steps=whole)
        if golden.form == "sketch":
            return cls(
                golden=golden,
                exact=False,
                steps=tuple(_of_sketch(step, golden, token) for step, token in enumerate(ids)),
            )
        return cls(golden=golden, exact=False, steps=())

    @property
    def perplexity(self) -> float | None:
        """exp of the mean surprisal of the ids; None where one of them is not known."""
        known = [step.surprisal for step in self.steps]
        if not known or any(value is None for value in known):
            return None
        return math.exp(sum(value for value in known if value is not None) / len(known))


def golden_of(name: str) -> Golden:
    """The golden of a case, by the case's name, on this platform.

    Raises:
        UsageError: No case, or more than one, has this name.
        GoldenError: It has no golden here, or one that cannot be believed.
    """
    chosen = select(load_cases(), name)
    if len(chosen) != 1:
        raise UsageError(
            f"{name!r} names {len(chosen)} cases",
            first="\n".join(case.name for case in chosen[:5]),
            next_step="name one of them",
        )
    (case,) = chosen
    version = golden_version(case.oracle, GOLDENS, platform_key())
    return Golden.load(golden_path(case, version=version or "none"))


def rows_at_hand(golden: Golden) -> Mapping[str, Tensor]:
    """Full tensors of a golden in execution order, from its side file or the local store; none where neither has them."""
    if golden.form == "full":
        return {name: golden.tensors[name] for name in golden.digests}
    version = golden.provenance.packages.get(golden.case.oracle, "")
    return row_store.load(golden.case, version, golden.digests) or {}


def _of_row(step: int, row: Tensor, token_id: int | None) -> StepView:
    logs = log_softmax(row)
    probabilities = np.exp(logs)
    entropy = float(-np.sum(probabilities * np.where(np.isneginf(logs), 0.0, logs)))
    return StepView(
        step=step,
        token_id=token_id,
        surprisal=None if token_id is None else float(-logs[token_id]),
        entropy_low=entropy,
        entropy_high=entropy,
        margin=top2_margin(row),
        top=likeliest(row),
    )


def _of_sketch(step: int, golden: Golden, token_id: int | None) -> StepView:
    """What 64 largest logits, 256 strided ones and the logsumexp determine.

    The mass outside the top lies on V - 64 ids, none likelier than the last of the top: its entropy is least if it sits on as
    few ids as that allows, and largest if it is spread evenly. What the rounding of the logsumexp blurs widens the interval.
    """
    sampled = golden.tensors
    vocabulary = next(entry.shape[-1] for entry in golden.entries if entry.name == logits_name(step))
    total = float(sampled["logsumexp"].values()[step])
    ids = sampled["top_ids"].values()[step].astype(np.int64)
    values = sampled["top_values"].values()[step]
    logs = values - total
    inside = float(-np.sum(np.exp(logs) * logs))
    blur = float(np.spacing(np.float32(abs(total)))) / 2  # the logsumexp is rounded to float32
    slack = blur * (1 + float(np.sum(np.exp(logs) * np.abs(logs))))
    rest = 1.0 - float(np.sum(np.exp(logs)))
    outside = max(0, vocabulary - ids.size)
    low, high = inside - slack, inside + slack
    if outside:
        most = max(0.0, rest) + blur
        low += max(0.0, rest - blur) * -float(logs[-1])
        high += most * (math.log(outside) - math.log(most))
    known = dict(zip(strided_ids(vocabulary).tolist(), sampled["strided"].values()[step].tolist(), strict=True))
    known.update(zip(ids.tolist(), values.tolist(), strict=True))
    return StepView(
        step=step,
        token_id=token_id,
        surprisal=total - known[token_id] if token_id in known else None,
        entropy_low=max(0.0, low),
        entropy_high=max(low, high),
        margin=float(values[0] - values[1]),
        top=tuple(Scored(token_id=int(i), logprob=float(v)) for i, v in zip(ids[:SHOWN], logs[:SHOWN], strict=True)),
    )
