"""When a cache turns quantised: the KV mode, and its check against a model before the first forward.

The order is mlx-lm's `generate_step`: the loop offers every cache for conversion after each piece of the prompt and after
each step, once the row of logits is taken. So a piece sees the earlier ones packed, and row 0 of a prompt that is fed
whole was computed on plain keys and values. Source: spec/kv.md section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.quantized import QuantizedCache, pack
from engine.cache.recurrent import RecurrentCache
from engine.errors import RequestError
from engine.quantization import AFFINE_BITS, AFFINE_GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMode:
    """How keys and values are kept.

    Attributes:
        bits: Width of a stored element; None keeps them as computed.
        group_size: Elements of a head that share a scale and a bias.
        start: A cache is converted once it holds at least this many tokens.
    """

    bits: int | None = None
    group_size: int = 64
    start: int = 0


def check_kv_mode(mode: KVMode, caches: Sequence[Cache], *, head_width: int, no_packed_kv: str | None) -> None:
    """Refuse a mode that the model cannot have, instead of ignoring it.

    Args:
        mode: What is asked for.
        caches: Empty ones, as the model makes them.
        head_width: Elements of a key or value head.
        no_packed_kv: The family's own reason against packing, if any.

    Raises:
        RequestError: Unknown width or group, a group that does not divide the head, or caches that cannot be packed.
    """
    if mode.bits is None:
        return
    if mode.bits not in AFFINE_BITS or mode.group_size not in AFFINE_GROUPS or mode.start < 0:
        raise RequestError(
            "unknown KV mode",
            bits=mode.bits,
            group_size=mode.group_size,
            start=mode.start,
            known=f"bits in {AFFINE_BITS}, group_size in {AFFINE_GROUPS}, start of 0 or more",
            next_step="choose one of these",
        )
    unpacked = sorted({cache.kind for cache in caches if not isinstance(cache, PlainCache | RecurrentCache)})
    plain = any(isinstance(cache, PlainCache) for cache in caches)
    if no_packed_kv or unpacked or not plain:
        raise RequestError(
            "the model's keys and values cannot be packed",
            reason=no_packed_kv or f"its caches are {', '.join(unpacked) or 'recurrent only'}",
            next_step="use the KV mode fp",
        )
    if head_width % mode.group_size:
        raise RequestError(
            "the KV mode does not fit the model's heads",
            head_width=head_width,
            group_size=mode.group_size,
            next_step=f"choose a group size that divides {head_width}",
        )


def converted(caches: Sequence[Cache], mode: KVMode) -> tuple[Cache, ...]:
    """Each plain cache that holds at least `mode.start` tokens, packed; every other one as it is."""
    return tuple(_converted(cache, mode) for cache in caches)


def _converted(cache: Cache, mode: KVMode) -> Cache:
    if mode.bits is None or not isinstance(cache, PlainCache) or cache.offset < mode.start:
        return cache
    if cache.keys is None or cache.values is None:
        return cache
    return QuantizedCache(
        keys=pack(cache.keys, bits=mode.bits, group_size=mode.group_size),
        values=pack(cache.values, bits=mode.bits, group_size=mode.group_size),
        offset=cache.offset,
    )
