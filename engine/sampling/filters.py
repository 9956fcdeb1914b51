"""The filters: each rules tokens out by setting them to -inf and leaves the others as they are.

Guarantees: pure functions of rows [B, V] of log-probabilities (or anything that differs from them by a constant a row, where
it says so); rows are filtered each by itself; the input array is never modified; nothing is renormalised. At least one token
of a row survives every filter.
Source: spec/samplers.md section 1.3.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal, get_args

import mlx.core as mx

from engine.errors import RequestError

TopPRule = Literal["mass-above", "mass-below"]
TOP_P_RULES: Final = get_args(TopPRule)
RULED_OUT: Final = -float("inf")


def top_p(logprobs_BV: mx.array, p: float, *, rule: TopPRule = "mass-above") -> mx.array:
    """Keep the most probable tokens that together hold `p`.

    Args:
        logprobs_BV: [B, V].
        p: Between 0 and 1, both excluded.
        rule: `mass-above` (mlx-lm 0.32.2): a token goes when the tokens above it hold `p` of the row's total or more; all
            tokens that tie with the last one kept stay. `mass-below` (mlx-lm 0.31.3): a token stays when it and the tokens
            below it hold more than 1 - p; of tokens that tie, the sort decides.

    Raises:
        RequestError: `p` or `rule` is none of these.

    Numerics: exponentials and their sequential sums in float32 for `mass-above`, in the dtype of the rows for `mass-below`.
    """
    if not 0 < p < 1:
        raise RequestError(
            "top_p is not a share", given=p, known="above 0 and below 1", next_step="leave it out to keep all"
        )
    if rule == "mass-above":
        ascending_BV = mx.sort(logprobs_BV, axis=-1)
        p_BV = mx.exp(ascending_BV.astype(mx.float32))
        above_BV = mx.cumsum(p_BV, axis=-1, reverse=True, inclusive=False)
        total_B1 = above_BV[:, :1] + p_BV[:, :1]
        dropped_B1 = mx.sum(above_BV >= p * total_B1, axis=-1, keepdims=True)
        least_B1 = mx.take_along_axis(ascending_BV, dropped_B1, axis=-1)
        return mx.where(logprobs_BV < least_B1, RULED_OUT, logprobs_BV)
    if rule == "mass-below":
        order_BV = mx.argsort(logprobs_BV, axis=-1)
        sorted_BV = mx.take_along_axis(logprobs_BV, order_BV, axis=-1)
        upto_BV = mx.cumsum(mx.exp(sorted_BV), axis=-1)
        kept_BV = mx.where(upto_BV > 1 - p, sorted_BV, RULED_OUT)
        return mx.put_along_axis(logprobs_BV, order_BV, kept_BV, axis=-1)
    raise RequestError(
        "unknown rule for top_p", given=repr(rule), known=", ".join(TOP_P_RULES), next_step="choose one of these"
    )


def min_p(logprobs_BV: mx.array, p: float, *, keep: int = 1) -> mx.array:
    """Keep the tokens that are at least `p` times as probable as the most probable one.

    Args:
        logprobs_BV: [B, V].
        p: Above 0, at most 1.
        keep: So many of the most probable tokens stay in any case; of those that tie the higher ids (mlx 0.32.4 on a CPU).

    Raises:
        RequestError: `p` or `keep` is out of range, or `keep` exceeds the vocabulary.

    Numerics: the threshold max + ln p is rounded to the dtype of the rows; a token that equals it stays.
    """
    if not 0 < p <= 1:
        raise RequestError(
            "min_p is not a share", given=p, known="above 0, at most 1", next_step="leave it out to keep all"
        )
    checked_keep(keep, logprobs_BV.shape[-1])
    least_B1 = mx.max(logprobs_BV, axis=-1, keepdims=True) + math.log(p)
    out_BV = logprobs_BV < least_B1
    if keep > 1:
        best_BK = mx.argpartition(logprobs_BV, kth=-keep, axis=-1)[:, -keep:]
        out_BV = mx.put_along_axis(out_BV, best_BK, mx.array(False), axis=-1)
    return mx.where(out_BV, RULED_OUT, logprobs_BV)


def xtc(
    logprobs_BV: mx.array, uniform: mx.array, *, probability: float, threshold: float, special: Sequence[int] = ()
) -> mx.array:
    """Exclude top choices: now and then rule out every likely token but the least likely of them.

    Args:
        logprobs_BV: [B, V]; only differences within a row count.
        uniform: A scalar in [0, 1); one for the whole batch.
        probability: How often tokens are excluded at all: where `uniform` is not above it.
        threshold: A token is likely when its share of what earlier filters left is above this; 0 to 0.5.
        special: Ids that are never excluded.

    Raises:
        RequestError: An option is out of range.

    Numerics: shares are a softmax in the dtype of the rows.
    """
    check_xtc(probability, threshold)
    share_BV = mx.softmax(logprobs_BV, axis=-1)
    least_likely_B1 = mx.min(mx.where(share_BV > threshold, share_BV, mx.inf), axis=-1, keepdims=True)
    out_BV = share_BV > least_likely_B1
    if outside := [token for token in special if not 0 <= token < logprobs_BV.shape[-1]]:
        raise RequestError(
            "xtc_special names tokens outside the vocabulary",
            ids=", ".join(map(str, outside[:5])),
            vocabulary=f"0 to {logprobs_BV.shape[-1] - 1}",
            next_step="tokenise with the tokenizer of this snapshot",
        )
    if special:
        ids = mx.array(list(special))
        out_BV = mx.put_along_axis(
            out_BV,
            mx.broadcast_to(ids, (out_BV.shape[0], len(special))),
            mx.array(False),
            axis=-1,
        )
    return mx.where(uniform > probability, logprobs_BV, mx.where(out_BV, RULED_OUT, logprobs_BV))


def top_k(logprobs_BV: mx.array, k: int) -> mx.array:
    """Keep the `k` most probable tokens; of those that tie at rank k the lower ids stay (mlx 0.32.4 on a CPU).

    Args:
        logprobs_BV: [B, V].
        k: At least 1 and below V.

    Raises:
        RequestError: `k` is not.
    """
    vocabulary = logprobs_BV.shape[-1]
    if type(k) is not int or not 0 < k < vocabulary:
        raise RequestError(
            "top_k is not a number of tokens to keep",
            given=repr(k),
            known=f"1 to {vocabulary - 1}",
            next_step="leave it out to keep all",
        )
    rest_BV = mx.argpartition(-logprobs_BV, kth=k - 1, axis=-1)[:, k:]
    return mx.put_along_axis(logprobs_BV, rest_BV, mx.array(RULED_OUT, logprobs_BV.dtype), axis=-1)


def checked_keep(keep: int, vocabulary: int | None = None) -> int:
    """The number of tokens that min-p must keep, if it is one.

    Raises:
        RequestError: It is not a whole number of at least 1, or exceeds the vocabulary.
    """
    most = math.inf if vocabulary is None else vocabulary
    if type(keep) is not int or not 1 <= keep <= most:
        raise RequestError(
            "min_tokens_to_keep is not a number of tokens",
            given=repr(keep),
            known="1 or more" if vocabulary is None else f"1 to {vocabulary}",
            next_step="use 1 to keep the most probable one",
        )
    return keep


def check_xtc(probability: float, threshold: float) -> None:
    """Refuse options of XTC that are out of range.

    Raises:
        RequestError: Either is.
    """
    if not 0 <= probability <= 1:
        raise RequestError(
            "xtc_probability is not a probability",
            given=probability,
            known="0 to 1",
            next_step="use 0 to switch it off",
        )
    if not 0 <= threshold <= 0.5:
        raise RequestError(
            "xtc_threshold is out of range", given=threshold, known="0 to 0.5", next_step="0.1 is customary"
        )
