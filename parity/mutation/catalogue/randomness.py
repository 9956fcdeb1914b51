"""Faults of what a draw rests on: the tokens that penalties look back on, and the keys that randomness comes from."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

from engine.sampling.keys import SequentialKeys
from parity.mutation.fault import Fault, drawn, fault
from parity.mutation.planting import swap

Function = Callable[..., Any]
WINDOW_OF: Final = "engine.sampling.processors:window"
PENALTIES: Final = (drawn("penalties"), drawn("penalties", seed=42))
REPETITION: Final = (drawn("repetition", "flat"), drawn("repetition", "masked"), drawn("repetition", "spread"))

WINDOW: Final = tuple(
    fault("sampler window", "processors", what, says=says, at="token_ids", cases=cases, plant=plant)
    for what, says, cases, plant in (
        (
            "one-more",
            "penalties look back one token too far",
            PENALTIES,
            swap(WINDOW_OF, lambda right: lambda history, size: right(history, size + 1 if size else 0)),
        ),
        (
            "one-less",
            "penalties look back one token too little",
            PENALTIES,
            swap(WINDOW_OF, lambda right: lambda history, size: right(history, size - 1 if size else 0)),
        ),
        (
            "all",
            "penalties look back on the whole history",
            PENALTIES,
            swap(WINDOW_OF, lambda right: lambda history, size: right(history, 0)),  # noqa: ARG005
        ),
        (
            "default-for-all",
            "0 stands for the default window, not for all",
            PENALTIES,
            swap(WINDOW_OF, lambda right: lambda history, size: right(history, size or 20)),
        ),
        (
            "oldest",
            "penalties look at the oldest tokens",
            REPETITION,
            swap(WINDOW_OF, lambda _: lambda history, size: history[:size] if size else history),
        ),
        (
            "without-the-last",
            "penalties do not see the token before",
            PENALTIES,
            swap(WINDOW_OF, lambda right: lambda history, size: right(history[:-1], size)),
        ),
        (
            "frequency-once",
            "the frequency penalty counts a token once",
            PENALTIES,
            swap(
                "engine.sampling.processors:frequency",
                lambda right: lambda logits, seen, penalty: right(logits, sorted(set(seen)), penalty),
            ),
        ),
        (
            "presence-every-time",
            "the presence penalty counts every occurrence",
            PENALTIES,
            swap(
                "engine.sampling.processors:presence",
                lambda _: lambda logits, seen, penalty: logits.at[:, mx.array(list(seen))].subtract(penalty),
            ),
        ),
    )
)


def taken(change: Callable[[Function, SequentialKeys, int], Any]) -> Callable[[Function], Function]:
    """A stream of keys that gives other ones."""
    return lambda right: lambda self, count: change(right, self, count)


def _never_advanced(right: Function, keys: SequentialKeys, count: int) -> Any:  # noqa: ANN401 - keys and a stream
    used, _ = right(keys, count)
    return used, keys


def _exchanged(right: Function, keys: SequentialKeys, count: int) -> Any:  # noqa: ANN401 - keys and a stream
    used, later = right(keys, count)
    return used[::-1], later


def _other_half(right: Function, keys: SequentialKeys, count: int) -> Any:  # noqa: ANN401 - keys and a stream
    del right
    state, used = keys.state, []
    for _ in range(count):
        pair = mx.random.split(state)
        state = pair[1]
        used.append(pair[0])
    return tuple(used), SequentialKeys(state=state)


def _one_more(right: Function, keys: SequentialKeys, count: int) -> Any:  # noqa: ANN401 - keys and a stream
    used, later = right(keys, count + 1 if count else 0)
    return used[:count], later


TAKE: Final = "engine.sampling.keys:SequentialKeys.take"
SEED: Final = "engine.sampling.keys:checked_seed"

SOURCE: Final = tuple(
    fault("sampler seed", part, what, says=says, at=at, cases=cases, plant=plant)
    for part, what, says, at, cases, plant in (
        (
            "keys",
            "never-advanced",
            "every draw uses the first key",
            "uniforms",
            drawn("t07"),
            swap(TAKE, taken(_never_advanced)),
        ),
        (
            "keys",
            "other-half",
            "the halves of a split are exchanged",
            "uniforms",
            drawn("t07"),
            swap(TAKE, taken(_other_half)),
        ),
        (
            "keys",
            "one-more",
            "every token uses up one key too many",
            "uniforms",
            drawn("t07"),
            swap(TAKE, taken(_one_more)),
        ),
        (
            "keys",
            "xtc-after-the-draw",
            "the draw's key is taken before XTC's",
            "uniforms",
            drawn("xtc"),
            swap(TAKE, taken(_exchanged)),
        ),
        (
            "seed",
            "one-more",
            "the seed is one too large",
            "uniforms",
            drawn("t07"),
            swap(SEED, lambda right: lambda seed: right(seed + 1)),
        ),
        (
            "seed",
            "thirty-two-bits",
            "the seed is cut to 32 bits",
            "uniforms",
            drawn("t07", seed=8589934593),
            swap(SEED, lambda right: lambda seed: right(seed & 0xFFFFFFFF)),
        ),
        (
            "seed",
            "zero-is-none",
            "seed 0 is taken for no seed",
            "uniforms",
            drawn("t07"),
            swap(SEED, lambda right: lambda seed: right(seed or 1234)),
        ),
        (
            "draw",
            "row-by-noise",
            "one row is drawn by Gumbel noise",
            "token_ids",
            (drawn("t07"), drawn("t2", "flat")),
            swap(
                "engine.sampling.chain:draw",
                lambda right: (
                    lambda logits, key: right(logits[0], key)[None] if logits.shape[0] == 1 else right(logits, key)
                ),
            ),
        ),
        (
            "draw",
            "rows-share-their-noise",
            "all rows of a batch are drawn with the same noise",
            "uniforms",
            drawn("t07", batch=3),
            swap(
                "engine.sampling.chain:draw",
                lambda right: lambda logits, key: mx.concatenate([right(row, key)[None] for row in logits]),
            ),
        ),
    )
)

FAULTS: Final[tuple[Fault, ...]] = (*WINDOW, *SOURCE)
