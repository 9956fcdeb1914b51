"""A branch: all that one sequence owns, as one immutable value.

Caches, the tokens in them, the row of logits that follows the last one, sampler with generator and penalties window, metrics.
To fork a branch is to keep it: two branches share every array until one of them goes on, and neither ever sees the other.

Guarantees: no function changes a branch or an array; what a branch becomes depends on it and the arguments alone. The order
of a token is fixed: drawn from the row, accepted (metrics of that same row), then fed; the row that it was drawn from is gone
only when the next one is there.
Source: spec/kv.md sections 14 and 15.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import numpy as np

from engine.branch.samplers import BranchSampler, Draw
from engine.cache.protocol import Cache
from engine.cache.trim import trimmed
from engine.errors import RequestError
from engine.metrics import SequenceMetrics, log_softmax, surprisal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """A sequence.

    Attributes:
        caches: One a layer that has any.
        tokens: Exactly those whose keys and values are in the caches.
        sampler: Draws from the row and remembers what it must.
        logits_BV: The row [1, V] that follows the last token; None before the first forward, after tokens were taken away,
            and in a fork that was asked to leave it.
        metrics: Perplexities of the accepted tokens.
        drawn: The last draw, until a token is accepted.
        fork_head: Tokens that were there when it was forked; 0 in a branch that was not.
    """

    caches: tuple[Cache, ...]
    sampler: BranchSampler
    tokens: tuple[int, ...] = ()
    logits_BV: mx.array | None = None
    metrics: SequenceMetrics = SequenceMetrics()  # noqa: RUF009 - a frozen value
    drawn: Draw | None = None
    fork_head: int = 0

    @property
    def size(self) -> int:
        """Tokens in the caches."""
        return len(self.tokens)

    @property
    def pos_max(self) -> int:
        """Position of the last token; -1 while empty."""
        return self.size - 1

    @property
    def row_BV(self) -> mx.array:  # noqa: N802 - a shape as suffix
        """The row of logits.

        Raises:
            RequestError: There is none.
        """
        if self.logits_BV is None:
            raise RequestError("the branch has no logits", tokens=self.size, next_step="feed it at least one token")
        return self.logits_BV

    @property
    def last_sampling_prior(self) -> float | None:
        """Probability with which the last draw was made, among what its sampler left possible; None without a draw."""
        return None if self.drawn is None else float(np.exp(-self.drawn.nats))

    def forked(self, *, with_logits: bool = True) -> Self:
        """The same branch as its own child: nothing is copied."""
        logits_BV, drawn = (self.logits_BV, self.drawn) if with_logits else (None, None)
        return replace(self, logits_BV=logits_BV, drawn=drawn, fork_head=self.size)

    def sampled(self) -> tuple[int, Self]:
        """A token drawn from the row, and the branch after the draw. The token is neither accepted nor fed.

        Raises:
            RequestError: There are no logits, or nothing can be drawn from them.
        """
        drawn, sampler = self.sampler.draw(self.row_BV)
        return drawn.token_id, replace(self, sampler=sampler, drawn=drawn)

    def accepted(self, token_id: int) -> Self:
        """The branch that has taken a token for its next one: metrics of the row, and the penalties window.

        Raises:
            RequestError: There are no logits, or the token lies outside their vocabulary.
        """
        (token_id,) = self._inside([token_id])
        nats = float(surprisal(self.row_BV, [token_id])[0])
        drawn = self.drawn if self.drawn is not None and self.drawn.token_id == token_id else None
        metrics = self.metrics.accept(model_nats=nats, sampling_nats=None if drawn is None else drawn.nats)
        return replace(self, metrics=metrics, sampler=self.sampler.accepted(token_id), drawn=None)

    def fed(self, token_ids: Sequence[int], caches: tuple[Cache, ...], logits_BV: mx.array) -> Self:
        """The branch after a forward over tokens, with what it gave."""
        return replace(self, tokens=(*self.tokens, *token_ids), caches=caches, logits_BV=logits_BV, drawn=None)

    def given(self, token_ids: Sequence[int]) -> Self:
        """The branch whose sampler knows of tokens that nobody drew."""
        return replace(self, sampler=self.sampler.given(token_ids))

    def without_last(self, count: int) -> Self:
        """The branch less its last tokens. Sampler and metrics stay: they tell what was accepted, not what is kept.

        Raises:
            RequestError: It has fewer tokens, or a cache of it cannot give any back.
        """
        if count == 0:
            return self
        caches = trimmed(self.caches, count)
        return replace(self, caches=caches, tokens=self.tokens[: self.size - count], logits_BV=None, drawn=None)

    def removed(self, start: int, end: int = -1) -> Self:
        """The branch less the positions from `start` to before `end`, which must be its last ones.

        Args:
            start: First position.
            end: -1 is the end of the sequence.

        Raises:
            RequestError: The range is none, or does not reach the end: a gap in the positions would stay.
        """
        last = self.size if end == -1 else end
        if not 0 <= start <= last <= self.size:
            raise RequestError(
                "no such range of positions",
                start=start,
                end=end,
                positions=f"0 to {self.size}",
                next_step="give a range of the sequence",
            )
        if last != self.size:
            raise RequestError(
                "only the end of a sequence can be removed",
                start=start,
                end=end,
                positions=f"0 to {self.size}",
                next_step="remove to the end (-1), or reseed from the first and the last tokens",
            )
        return self.without_last(self.size - start)

    def logits_at(self, token_ids: Sequence[int]) -> list[float]:
        """Logits of some ids.

        Raises:
            RequestError: There are no logits, or an id lies outside their vocabulary.
        """
        row_V = np.array(self.row_BV.astype(mx.float32))[0]
        return [float(row_V[token_id]) for token_id in self._inside(token_ids)]

    def prior(self, token_id: int) -> float:
        """Probability of a token under the row.

        Raises:
            RequestError: There are no logits, or the id lies outside their vocabulary.
        """
        (token_id,) = self._inside([token_id])
        return float(np.exp(log_softmax(self.row_BV)[0, token_id]))

    def with_logits(self, logits_BV: mx.array) -> Self:
        """The branch with another row in place of its own.

        Raises:
            RequestError: It has another shape than the row.
        """
        if logits_BV.shape != self.row_BV.shape:
            raise RequestError(
                "the logits do not fit the branch",
                expected=list(self.row_BV.shape),
                actual=list(logits_BV.shape),
                next_step="pass a row of the same model",
            )
        return replace(self, logits_BV=logits_BV, drawn=None)

    def merged_logits(self, experts: Sequence["Branch"], alpha: float = 1.0) -> Self:
        """The branch with `alpha` times the sum of other rows added to its own.

        Args:
            experts: Branches of models with the same vocabulary, in the order of the sum.
            alpha: Factor.

        Numerics: each row is scaled, then added, in the dtype of the branch's row.
        """
        row_BV = self.row_BV
        for expert in experts:
            row_BV = row_BV + expert.row_BV.astype(row_BV.dtype) * alpha
        return self.with_logits(row_BV)

    def _inside(self, token_ids: Sequence[int]) -> Sequence[int]:
        vocabulary = self.row_BV.shape[-1]
        if outside := [token_id for token_id in token_ids if not 0 <= token_id < vocabulary]:
            raise RequestError(
                "no logits for ids outside the vocabulary",
                ids=", ".join(map(str, outside[:5])),
                vocabulary=f"0 to {vocabulary - 1}",
                next_step="tokenise with the tokenizer of this snapshot",
            )
        return token_ids
