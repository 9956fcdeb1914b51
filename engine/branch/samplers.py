"""Samplers as values: options, random generator and penalties window in one, so that a fork of a sequence forks them.

Guarantees: `draw` and `accepted` give another sampler and leave the old one as it was, generators included; two forks that are
told the same draw the same. The ids are those of the samplers in `engine.sampling` and `engine.llama_sampling`, for the same
options, seed and history.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import mlx.core as mx
import numpy as np

from engine.generate import greedy
from engine.llama_sampling.generators import Generator
from engine.llama_sampling.history import TokenHistoryTracker
from engine.llama_sampling.strategy import SamplingStrategy, sample_with_strategy
from engine.metrics import sampling_surprisal
from engine.sampling import optiq_chain
from engine.sampling.chain import Chain, filtered, sample
from engine.sampling.keys import CounterKeys, SequentialKeys
from engine.sampling.optiq_chain import OptiqChain
from engine.sampling.processors import Processing, process
from engine.sampling.rows import check_rows, log_probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A drawn token.

    Attributes:
        token_id: The token.
        nats: Its surprisal among the tokens that the sampler left possible; 0 where one was left.
    """

    token_id: int
    nats: float


class BranchSampler(Protocol):
    """A sampler of one branch."""

    def draw(self, logits_BV: mx.array) -> tuple[Draw, Self]:
        """The token that follows a row [1, V], and the sampler after the draw. The token is not yet accepted."""
        ...

    def accepted(self, token_id: int) -> Self:
        """The sampler that knows of one more token of the sequence."""
        ...

    def given(self, token_ids: Sequence[int]) -> Self:
        """The sampler that knows of tokens that were fed and never drawn, such as a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class GreedySampler:
    """The most probable id, as `engine.generate.greedy` picks it; it has no memory."""

    def draw(self, logits_BV: mx.array) -> tuple[Draw, Self]:
        """The most probable id; nothing else was possible."""
        return Draw(token_id=greedy(logits_BV, 0), nats=0.0), self

    def accepted(self, token_id: int) -> Self:
        """Itself."""
        del token_id
        return self

    def given(self, token_ids: Sequence[int]) -> Self:
        """Itself."""
        del token_ids
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainSampler:
    """mlx-lm's processors and chain; its penalties look at the prompt too.

    Attributes:
        chain: Filters and temperature.
        keys: Where random keys come from.
        processing: Logit bias and penalties.
        history: Every token of the sequence, oldest first.
    """

    chain: Chain
    keys: SequentialKeys | CounterKeys
    processing: Processing = field(default_factory=Processing)
    history: tuple[int, ...] = ()

    def draw(self, logits_BV: mx.array) -> tuple[Draw, Self]:
        """One token.

        Raises:
            RequestError: The row has no probabilities, or an option does not fit the vocabulary.
        """
        check_rows(logits_BV)
        logp_BV = log_probabilities(process(logits_BV, self.history, self.processing))
        ids_B, keys = sample(logp_BV, self.chain, self.keys)
        token_id = int(np.array(ids_B)[0])
        return Draw(token_id=token_id, nats=self._nats(logp_BV, token_id)), replace(self, keys=keys)

    def accepted(self, token_id: int) -> Self:
        """With one more token in the history."""
        return replace(self, history=(*self.history, token_id))

    def given(self, token_ids: Sequence[int]) -> Self:
        """With more tokens in the history."""
        return replace(self, history=(*self.history, *token_ids))

    def _nats(self, logp_BV: mx.array, token_id: int) -> float:
        if self.chain.temperature == 0:
            return 0.0
        used, _ = self.keys.take(self.chain.num_keys)  # the keys of the draw, once more: sources are values
        uniform = mx.random.uniform(key=used[0]) if self.chain.xtc_probability > 0 else None
        kept_BV = filtered(logp_BV, self.chain, uniform)
        return float(sampling_surprisal(kept_BV, [token_id], temperature=self.chain.temperature)[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptiqSampler:
    """mlx-optiq's chain in its own engine; it has no penalties.

    Attributes:
        chain: Temperature and filters.
        keys: Where random keys come from.
    """

    chain: OptiqChain
    keys: SequentialKeys | CounterKeys

    def draw(self, logits_BV: mx.array) -> tuple[Draw, Self]:
        """One token.

        Raises:
            RequestError: The row has no probabilities, or an option does not fit the vocabulary.
        """
        check_rows(logits_BV)
        ids_B, keys = optiq_chain.sample(logits_BV, self.chain, self.keys)
        token_id, nats = int(np.array(ids_B)[0]), 0.0
        if self.chain.temperature > 0:
            nats = float(sampling_surprisal(optiq_chain.filtered(logits_BV, self.chain), [token_id])[0])
        return Draw(token_id=token_id, nats=nats), replace(self, keys=keys)

    def accepted(self, token_id: int) -> Self:
        """Itself."""
        del token_id
        return self

    def given(self, token_ids: Sequence[int]) -> Self:
        """Itself."""
        del token_ids
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LlamaSampler:
    """llama.cpp's samplers; its history holds accepted tokens alone, never a prompt.

    Attributes:
        strategy: Samplers and pick, with what the pick has learned.
        prng: Generator of the draw; never moved, only cloned.
        history: Accepted tokens; never changed, only cloned.
        xtc_prng: Generator of XTC; `prng` where absent.
    """

    strategy: SamplingStrategy
    prng: Generator
    history: TokenHistoryTracker = field(default_factory=lambda: TokenHistoryTracker(64))
    xtc_prng: Generator | None = None

    def draw(self, logits_BV: mx.array) -> tuple[Draw, Self]:
        """One token.

        Raises:
            RequestError: The logits are not one row, hold NaN or +inf, or leave nothing to pick.
        """
        prng, xtc_prng = self.prng.clone(), None if self.xtc_prng is None else self.xtc_prng.clone()
        row_V = np.array(logits_BV.astype(mx.float32))[0]
        drawn = sample_with_strategy(
            row_V, token_history=self.history, params=self.strategy, prng=prng, xtc_prng=xtc_prng
        )
        left = drawn.candidates
        place = int(np.flatnonzero(left.ids == drawn.token_id)[0])
        logits = left.logits.astype(np.float64) - float(left.logits.max())
        nats = float(np.log(np.exp(logits).sum()) - logits[place])
        after = replace(self, strategy=drawn.params, prng=prng, xtc_prng=xtc_prng)
        return Draw(token_id=drawn.token_id, nats=nats), after

    def accepted(self, token_id: int) -> Self:
        """With one more token in the history."""
        history = self.history.clone()
        history.accept(token_id)
        return replace(self, history=history)

    def given(self, token_ids: Sequence[int]) -> Self:
        """Itself: llama.cpp's penalties do not see what was not accepted."""
        del token_ids
        return self
