"""Candidates: the ids that may still be picked, with their logits, as arrays that nobody changes.

Guarantees: arrays are read-only copies, so a caller's logits are never modified and old candidates stay valid. The order of
candidates is part of the value, because a draw walks them in order. Ties keep the order that they had; llama.cpp's sort
leaves the order of ties to its C++ library, so there, and only there, orders may differ.
"""

from dataclasses import dataclass, replace
from typing import Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from engine.errors import RequestError

Float32s = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
Array = TypeVar("Array", bound=npt.NDArray[np.generic])

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """What may still be picked.

    Attributes:
        ids: Token ids, int32 [N].
        logits: Their logits, float32 [N]; -inf is never picked.
        probs: Their probabilities as computed last, float32 [N]; later changes of logits drop them.
        is_sorted: Whether the logits are known to descend.
    """

    ids: Ids
    logits: Float32s
    probs: Float32s | None = None
    is_sorted: bool = False

    @classmethod
    def from_logits(cls, logits_V: npt.ArrayLike) -> Self:
        """All ids of a vocabulary in their order.

        Args:
            logits_V: [V], any float dtype; copied to float32.

        Raises:
            RequestError: Not one row, empty, NaN or +inf somewhere, or -inf everywhere.
        """
        row_V = np.array(logits_V, dtype=np.float32)
        if row_V.ndim != 1 or row_V.size == 0:
            raise RequestError(
                "a sampler takes one row of logits", shape=list(row_V.shape), next_step="pass logits of shape [V]"
            )
        bad = np.flatnonzero(np.isnan(row_V) | np.isposinf(row_V))
        if bad.size:
            raise RequestError(
                "the logits hold NaN or +inf",
                ids=", ".join(map(str, bad[:_SHOWN])),
                count=f"{bad.size} of {row_V.size}",
                next_step="find the forward that made them: assay explain CASE",
            )
        made = cls(ids=frozen(np.arange(row_V.size, dtype=np.int32)), logits=frozen(row_V))
        made.check_some_possible()
        return made

    def __len__(self) -> int:
        return len(self.ids)

    def check_some_possible(self) -> None:
        """Refuse candidates of which none can be picked.

        Raises:
            RequestError: Every logit is -inf.
        """
        if not np.isfinite(self.logits).any():
            raise RequestError(
                "no token can be picked: every logit is -inf",
                candidates=len(self),
                next_step="loosen the mask, the bias or the penalties",
            )

    def taken(self, order: npt.NDArray[np.intp] | slice, *, is_sorted: bool) -> Self:
        """Those at the given places, in that order."""
        probs = None if self.probs is None else frozen(self.probs[order])
        return replace(
            self, ids=frozen(self.ids[order]), logits=frozen(self.logits[order]), probs=probs, is_sorted=is_sorted
        )

    def with_logits(self, logits: Float32s, *, is_sorted: bool) -> Self:
        """The same ids with other logits; probabilities are dropped."""
        return replace(self, logits=frozen(logits), probs=None, is_sorted=is_sorted)

    def with_probs(self, probs: Float32s) -> Self:
        """The same candidates with given probabilities."""
        return replace(self, probs=frozen(probs))

    def sorted(self) -> Self:
        """In descending order of logits; ties keep their order."""
        if self.is_sorted:
            return self
        return self.taken(np.argsort(-self.logits, kind="stable"), is_sorted=True)

    def softmaxed(self) -> Self:
        """The same candidates with fresh probabilities.

        Numerics: float32: the largest logit is subtracted, exp is rounded once, the sum runs from first to last in float32,
            and each term is divided by it.
        Source: spec/samplers.md section 3.2.
        """
        terms = exp32(self.logits - self.logits.max())
        return self.with_probs(terms / running_sum(terms)[-1])


def frozen(array: Array) -> Array:
    """The array, no longer writeable."""
    array.setflags(write=False)
    return array


def exp32(values: Float32s) -> Float32s:
    """exp in float32.

    Numerics: computed in double and rounded once, which is what a good C library's expf gives in nearly all cases; numpy's
        own float32 exp is up to 2 ULP away and depends on the processor.
    """
    return np.exp(values.astype(np.float64)).astype(np.float32)


def log32(values: Float32s) -> Float32s:
    """Natural log in float32, computed in double and rounded once; log of 0 is -inf."""
    with np.errstate(divide="ignore"):
        return np.log(values.astype(np.float64)).astype(np.float32)


def running_sum(values: Float32s) -> Float32s:
    """Sums from the first to each, rounded to float32 after each addition (numpy's `sum` adds pairwise)."""
    return np.add.accumulate(values, dtype=np.float32)


def entropy32(probs: Float32s) -> np.float32:
    """Entropy in nats.

    Numerics: float32, terms added from first to last; a probability of 0 adds 0.
    """
    possible = probs[probs > 0]
    return np.float32(running_sum(-possible * log32(possible))[-1])
