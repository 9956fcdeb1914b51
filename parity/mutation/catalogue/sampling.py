"""Faults of drawing tokens: filters and penalties that are left out, wrong, or in another order.

A sampler case has no modules; a fault is first seen in the randomness behind the ids, or in the ids alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx

from engine.sampling import filters
from engine.sampling.chain import Chain
from engine.sampling.processors import Processing
from parity.mutation.changes import plus, to
from parity.mutation.fault import Fault, drawn, fault
from parity.mutation.planting import swap

Function = Callable[..., Any]
FILTERED: Final = "engine.sampling.chain:filtered"


def in_order(*names: str) -> Callable[[Function], Function]:
    """The chain's filters in another order, each as it is."""

    def by(_: Function) -> Function:
        def wrong(logprobs: mx.array, chain: Chain, uniform: mx.array | None = None) -> mx.array:
            for name in names:
                logprobs = _filtered(name, logprobs, chain, uniform)
            return logprobs

        return wrong

    return by


def _filtered(name: str, logprobs: mx.array, chain: Chain, uniform: mx.array | None) -> mx.array:
    if name == "top_p" and 0 < chain.top_p < 1:
        return filters.top_p(logprobs, chain.top_p)
    if name == "min_p" and chain.min_p > 0:
        return filters.min_p(logprobs, chain.min_p, keep=chain.min_tokens_to_keep)
    if name == "xtc" and chain.xtc_probability > 0 and uniform is not None:
        options = {"probability": chain.xtc_probability, "threshold": chain.xtc_threshold, "special": chain.xtc_special}
        return filters.xtc(logprobs, uniform, **options)  # type: ignore[arg-type]
    if name == "top_k" and chain.top_k > 0:
        return filters.top_k(logprobs, chain.top_k)
    return logprobs


def chain_with(**changes: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Filters that see other options."""

    def by(right: Function) -> Function:
        def wrong(logprobs: mx.array, chain: Chain, uniform: mx.array | None = None) -> Any:  # noqa: ANN401
            changed = {name: change(getattr(chain, name)) for name, change in changes.items()}
            return right(logprobs, replace(chain, **changed), uniform)

        return wrong

    return by


def temperature_first(right: Function) -> Function:
    """Filters see what temperature left, as other chains have it."""

    def wrong(logprobs: mx.array, chain: Chain, uniform: mx.array | None = None) -> Any:  # noqa: ANN401
        return right(logprobs * (1 / chain.temperature), chain, uniform) * chain.temperature

    return wrong


def uniform_inverted(right: Function) -> Function:
    """XTC that looks at one less its uniform."""

    def wrong(logprobs: mx.array, uniform: mx.array, **options: Any) -> Any:  # noqa: ANN401
        return right(logprobs, 1 - uniform, **options)

    return wrong


def repetition_last(right: Function) -> Function:
    """Processors of which the repetition penalty comes last."""

    def wrong(logits: mx.array, history: Sequence[int], options: Processing) -> Any:  # noqa: ANN401 - an mx.array
        others = right(logits, history, replace(options, repetition_penalty=0.0))
        alone = Processing(repetition_penalty=options.repetition_penalty, repetition_window=options.repetition_window)
        return right(others, history, alone)

    return wrong


def keeps_the_most_likely(_: Function) -> Function:
    """XTC that spares the most likely of the likely tokens."""

    def wrong(
        logprobs: mx.array, uniform: mx.array, *, probability: float, threshold: float, special: Sequence[int] = ()
    ) -> mx.array:
        del special
        shares = mx.softmax(logprobs, axis=-1)
        out = (shares > threshold) & (shares < mx.max(shares, axis=-1, keepdims=True))
        return mx.where(uniform > probability, logprobs, mx.where(out, -float("inf"), logprobs))

    return wrong


def without(name: str) -> Callable[[Function], Function]:
    """A function that is not told one option."""
    return lambda right: lambda *given, **options: right(*given, **{k: v for k, v in options.items() if k != name})


FAULTS: Final[tuple[Fault, ...]] = tuple(
    fault(
        "sampler order",
        part,
        what,
        says=says,
        at="uniforms" if part == "optiq" else "token_ids",  # there the noise behind the id that was drawn
        cases=cases,
        plant=plant,
    )
    for part, what, says, cases, plant in (
        (
            "chain",
            "temperature-first",
            "filters see what temperature left",
            (drawn("all"), drawn("top-p05", "spread"), drawn("min-p005", "spread")),
            swap(FILTERED, temperature_first),
        ),
        (
            "chain",
            "top-k-first",
            "top-k comes before the other filters",
            (drawn("all"), drawn("all", "spread"), drawn("all", "flat")),
            swap(FILTERED, in_order("top_k", "top_p", "min_p", "xtc")),
        ),
        (
            "chain",
            "xtc-first",
            "XTC comes before the other filters",
            (drawn("all"), drawn("all", "flat"), drawn("all", "spread")),
            swap(FILTERED, in_order("xtc", "top_p", "min_p", "top_k")),
        ),
        (
            "chain",
            "top-k-lost",
            "top-k is not applied",
            (drawn("top-k40"),),
            swap(FILTERED, in_order("top_p", "min_p", "xtc")),
        ),
        (
            "chain",
            "top-k-one-more",
            "top-k keeps one token more",
            (drawn("top-k3", "flat"), drawn("top-k40")),
            swap(FILTERED, chain_with(top_k=plus(1))),
        ),
        (
            "chain",
            "top-p-from-below",
            "top-p sums from the least probable token, as mlx-lm 0.31.3",
            (drawn("top-p09"), drawn("top-p05", "flat")),
            swap(FILTERED, chain_with(top_p_rule=to("mass-below"))),
        ),
        (
            "chain",
            "min-p-keeps-one",
            "min-p keeps one token where five are asked for",
            drawn("min-p095-keep5", "spread"),
            swap(FILTERED, chain_with(min_tokens_to_keep=to(1))),
        ),
        (
            "xtc",
            "keeps-the-most-likely",
            "XTC spares the most likely of the likely tokens",
            (drawn("xtc"), drawn("all")),
            swap("engine.sampling.filters:xtc", keeps_the_most_likely),
        ),
        (
            "xtc",
            "special-forgotten",
            "XTC excludes special tokens too",
            (drawn("xtc-special"), drawn("xtc-special", seed=42)),
            swap("engine.sampling.filters:xtc", without("special")),
        ),
        (
            "xtc",
            "uniform-inverted",
            "XTC looks at one less its uniform",
            (drawn("all"),),
            swap("engine.sampling.filters:xtc", uniform_inverted),
        ),
        (
            "processors",
            "repetition-last",
            "the repetition penalty comes after the others",
            (drawn("penalties"), drawn("penalties", seed=42)),
            swap("parity.sampler_engine:process", repetition_last),
        ),
        (
            "processors",
            "negative-logits-divided",
            "negative logits of repeated tokens are divided too",
            (drawn("repetition", "spread"), drawn("repetition", "flat")),
            swap(
                "engine.sampling.processors:repetition",
                lambda right: (
                    lambda logits, seen, penalty: mx.where(
                        logits < 0, right(logits, seen, 1 / penalty), right(logits, seen, penalty)
                    )
                ),
            ),
        ),
        (
            "processors",
            "bias-subtracted",
            "the logit bias is subtracted",
            (drawn("penalties"), drawn("all")),
            swap(
                "engine.sampling.processors:bias",
                lambda right: lambda logits, biases: right(logits, {token: -b for token, b in biases.items()}),
            ),
        ),
        (
            "optiq",
            "normalised-first",
            "filters of mlx-optiq's chain see the logits before temperature",
            (drawn("all", chain="optiq"), drawn("top-p09", chain="optiq"), drawn("top-p09", "spread", chain="optiq")),
            swap(
                "engine.sampling.optiq_chain:filtered",
                lambda right: lambda logits, chain: right(logits, replace(chain, temperature=1.0)) / chain.temperature,
            ),
        ),
        (
            "optiq",
            "walks-the-sum",
            "one row is drawn by its cumulative sum, as mlx-lm does",
            (drawn("t07", chain="optiq"),),
            swap(
                "engine.sampling.optiq_chain:draw",
                lambda right: lambda logp, key: right(logp[None], key)[0] if logp.ndim == 1 else right(logp, key),
            ),
        ),
    )
)
