"""Faults of the conversion of a cache to packed keys and values: when it happens, and to what."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx

from engine.cache.convert import KVMode
from engine.cache.plain import PlainCache
from engine.cache.quantized import QuantizedCache, pack
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import swap

O_PROJ: Final = "model.layers.0.self_attn.o_proj"
IN_PIECES: Final = "the last token is fed alone: it learns of what the pieces before it saw a layer later"
Method = Callable[..., Any]


def twice_packed(right: Method) -> Method:
    """What is packed is unpacked and packed again, with half the bits in between."""

    def wrong(heads: mx.array, *, bits: int, group_size: int, **options: Any) -> Any:  # noqa: ANN401 - packed heads
        half = max(bits // 2, 2)
        coarse = mx.dequantize(*mx.quantize(heads, group_size=group_size, bits=half), group_size=group_size, bits=half)
        return right(coarse, bits=bits, group_size=group_size, **options)

    return wrong


def at_conversion(change: Callable[[QuantizedCache, PlainCache, KVMode], Any]) -> Callable[[Method], Method]:
    """A conversion whose result is changed; the plain cache and the mode are told."""

    def by(right: Method) -> Method:
        def wrong(cache: Any, mode: KVMode, *rest: Any) -> Any:  # noqa: ANN401 - a cache
            new = right(cache, mode, *rest)
            return change(new, cache, mode) if new is not cache else new

        return wrong

    return by


def only_after(start: int) -> Callable[[Method], Method]:
    """Conversion that waits for `start` tokens more than it should."""
    return lambda right: lambda cache, mode, *rest: right(cache, replace(mode, start=mode.start + start), *rest)


KV8, KV4, LATE = (taps("llama", kv=kv) for kv in ("kv8-g64", "kv4-g32-s16", "kv4-g32-s44"))
CONVERT: Final = "engine.cache.convert:_converted"

CONVERSION: Final = tuple(
    fault(
        "KV conversion",
        part,
        what,
        says=says,
        at=at,
        cases=cases,
        plant=plant,
        hidden=IN_PIECES if what == "after-the-prompt" else "",
    )
    for part, what, says, at, cases, plant in (
        (
            "order",
            "one-token-late",
            "conversion begins one token after its threshold",
            O_PROJ,
            LATE,
            swap(CONVERT, only_after(1)),
        ),
        (
            "order",
            "one-token-early",
            "conversion begins one token before its threshold",
            O_PROJ,
            LATE,
            swap(CONVERT, only_after(-1)),
        ),
        (
            "order",
            "after-the-prompt",
            "pieces of the prompt are not converted before the next piece sees them",
            O_PROJ,
            (taps("llama", kv="kv8-g64", feed="chunk7"),),
            swap(CONVERT, only_after(39)),
        ),
        (
            "order",
            "never",
            "the KV mode is ignored",
            "cache",
            KV8,
            swap(CONVERT, lambda _: lambda cache, *_: cache),
        ),
        (
            "order",
            "threshold-ignored",
            "conversion does not wait for its threshold",
            O_PROJ,
            LATE,
            swap(CONVERT, only_after(-44)),
        ),
        (
            "parts",
            "keys-and-values-exchanged",
            "packed keys and values are in each other's place",
            O_PROJ,
            KV8,
            swap(CONVERT, at_conversion(lambda new, *_: replace(new, keys=new.values, values=new.keys))),
        ),
        (
            "parts",
            "offset-one-behind",
            "a converted cache counts one position too few",
            O_PROJ,
            KV4,
            swap(CONVERT, at_conversion(lambda new, *_: replace(new, offset=new.offset - 1))),
        ),
        (
            "parts",
            "packed-twice",
            "what is converted goes through half the bits first",
            O_PROJ,
            KV8,
            swap("engine.cache.convert:pack", twice_packed),
        ),
        (
            "parts",
            "appended-packed-twice",
            "what is appended goes through half the bits first",
            O_PROJ,
            KV8,
            swap("engine.cache.quantized:pack", twice_packed),
        ),
        (
            "parts",
            "values-as-the-keys",
            "keys are packed in the place of values too",
            O_PROJ,
            KV4,
            swap(
                CONVERT,
                at_conversion(
                    lambda new, plain, mode: replace(
                        new, values=pack(plain.arrays[0], bits=mode.bits or 8, group_size=mode.group_size)
                    )
                ),
            ),
        ),
        (
            "parts",
            "other-group",
            "converted heads are packed in groups of twice the size",
            "cache",
            KV4,
            swap(
                "engine.cache.convert:pack",
                lambda right: lambda heads, **options: right(heads, **{**options, "group_size": 64}),
            ),
        ),
        (
            "parts",
            "other-bits",
            "converted heads are packed with twice the bits",
            "cache",
            KV4,
            swap(
                "engine.cache.convert:pack",
                lambda right: lambda heads, **options: right(heads, **{**options, "bits": 8}),
            ),
        ),
        (
            "parts",
            "another-scale",
            "queries of packed keys are divided by 9 where 8 belongs",
            O_PROJ,
            KV8,
            swap(
                "engine.attention:attend_packed",
                lambda right: lambda q, *heads, **options: right(q * 8.0, *heads, **{**options, "scale": 1 / 72}),
            ),
        ),
    )
)

FAULTS: Final[tuple[Fault, ...]] = CONVERSION
