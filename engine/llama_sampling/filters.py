"""Filters: top-k, top-p, min-p, locally typical, top-n-sigma.

Guarantees: at least one candidate that can be picked survives; survivors keep their logits. A filter shrinks the list, but
top-n-sigma, which masks with -inf. The order in which survivors come out (sorted, by score, as they were) follows
llama.cpp, because a draw walks it.
"""

from dataclasses import dataclass

import numpy as np

from engine.llama_sampling.candidates import Candidates, entropy32, log32, running_sum
from engine.llama_sampling.context import Context
from engine.llama_sampling.options import check_number, check_whole


@dataclass(frozen=True, slots=True)
class TopK:
    """The k most probable.

    Attributes:
        k: Survivors at most; 0 or less turns the filter off.

    Source: spec/samplers.md section 3.2.
    """

    k: int

    def __post_init__(self) -> None:
        check_whole("top-k", self.k, low=-(2**31))

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """Candidates sorted in descending order, cut to k; as they were when off."""
        del context
        if self.k <= 0:
            return candidates
        return candidates.sorted().taken(slice(0, self.k), is_sorted=True)


@dataclass(frozen=True, slots=True)
class TopP:
    """The most probable until their probabilities reach p; the one that crosses is kept.

    Attributes:
        p: Mass to reach; 1 or more turns the filter off.
        min_keep: Survivors at least.

    Numerics: probabilities and their running sum in float32.
    Source: spec/samplers.md section 3.2.
    """

    p: float
    min_keep: int = 1

    def __post_init__(self) -> None:
        check_number("top-p", self.p, low=0)
        check_whole("min_keep", self.min_keep, low=0)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """Candidates sorted and cut; as they were when off."""
        del context
        if self.p >= 1:
            return candidates
        ranked = candidates.softmaxed().sorted()  # the sum of the probabilities runs in the order before the sort
        assert ranked.probs is not None  # noqa: S101 - softmaxed gives them
        reached = running_sum(ranked.probs) >= np.float32(self.p)
        reached[: max(self.min_keep - 1, 0)] = False
        return ranked.taken(slice(0, _up_to_first(reached)), is_sorted=True)


@dataclass(frozen=True, slots=True)
class MinP:
    """Those at least p times as probable as the most probable.

    Attributes:
        p: Fraction of the largest probability; 0 or less turns the filter off.
        min_keep: Survivors at least.

    Numerics: in logits: at least max + log(p), the log and the sum rounded to float32.
    Source: spec/samplers.md section 3.2.
    """

    p: float
    min_keep: int = 1

    def __post_init__(self) -> None:
        check_number("min-p", self.p)
        check_whole("min_keep", self.min_keep, low=0)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """Candidates in the order that they had, or sorted where `min_keep` had to be filled up."""
        del context
        if self.p <= 0:
            return candidates
        floor = candidates.logits.max() + log32(np.array([self.p], dtype=np.float32))[0]
        kept = np.flatnonzero(candidates.logits >= floor)
        least = max(self.min_keep, 1)
        if len(kept) >= least:
            return candidates.taken(kept, is_sorted=candidates.is_sorted)
        return candidates.sorted().taken(slice(0, least), is_sorted=True)


@dataclass(frozen=True, slots=True)
class TypicalP:
    """Those whose surprisal is nearest to the entropy, until their probabilities exceed p.

    Attributes:
        p: Mass to exceed; 1 or more turns the filter off.
        min_keep: Survivors at least.

    Numerics: float32; a candidate of probability 0 adds nothing to the entropy and comes last.
    Source: spec/samplers.md section 3.2; Meister et al., "Locally Typical Sampling", 2022.
    """

    p: float
    min_keep: int = 1

    def __post_init__(self) -> None:
        check_number("typical-p", self.p, low=0)
        check_whole("min_keep", self.min_keep, low=0)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """Candidates by rising distance from the entropy, flagged unsorted."""
        del context
        if self.p >= 1:
            return candidates
        ranked = candidates.sorted().softmaxed()
        assert ranked.probs is not None  # noqa: S101 - softmaxed gives them
        distance = np.abs(-log32(ranked.probs) - entropy32(ranked.probs))
        ranked = ranked.taken(np.argsort(distance, kind="stable"), is_sorted=False)
        assert ranked.probs is not None  # noqa: S101 - taken keeps them
        exceeded = running_sum(ranked.probs) > np.float32(self.p)
        exceeded[: max(self.min_keep - 1, 0)] = False
        return ranked.taken(slice(0, _up_to_first(exceeded)), is_sorted=False)


@dataclass(frozen=True, slots=True)
class TopNSigma:
    """Those within n standard deviations of the largest logit.

    Attributes:
        n: Deviations; 0 or less turns the filter off.

    Numerics: mean and deviation (of the population) over logits that are not -inf, sums in float32 from first to last.
    Source: spec/samplers.md section 3.2, which goes on to softmax and sort; llama.cpp 0.3.36 as recorded masks alone. Tang et
        al., "Top-nσ: Not All Logits Are You Need", 2024.
    """

    n: float

    def __post_init__(self) -> None:
        check_number("top-n-sigma", self.n)

    def apply(self, candidates: Candidates, context: Context) -> Candidates:
        """All candidates in the order that they had, with -inf for those rejected; as they were when off."""
        del context
        if self.n <= 0 or len(candidates) <= 1:
            return candidates
        logits = candidates.logits
        finite = logits[np.isfinite(logits)]
        count = np.float32(len(finite))
        mean = running_sum(finite)[-1] / count
        deviation = np.sqrt(running_sum((finite - mean) ** 2)[-1] / count)
        floor = logits.max() - np.float32(self.n) * deviation
        masked = np.where(logits < floor, np.float32(-np.inf), logits)
        return candidates.with_logits(masked, is_sorted=candidates.is_sorted)


def _up_to_first(hit: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Length of the list up to the first hit and with it; the whole list where there is none."""
    return int(hit.argmax()) + 1 if hit.any() else len(hit)
