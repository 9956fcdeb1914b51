"""A model's empty caches in one of TurboQuant's two forms, or the reason why it cannot have them.

Guarantees: every layer of ordinary attention is coded (in mlx-vlm's form all but the model's last cache, where it makes more
than two), recurrent ones stay as they are, and any other model is refused before its first forward. Excludes every other KV
mode: pass the caches to `engine.generate.steps` without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.cache.turboquant import TurboQuantCache
from engine.cache.turboquant_vlm import TurboQuantVlmCache
from engine.errors import RequestError
from engine.model import CausalModel
from engine.turboquant import affine_keys, rotated_values, unit_codec

VLM_BITS: Final = (2, 3, 3.5, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueTurbo:
    """The key-value-width form.

    Attributes:
        key_bits: 2, 4, 5 or 8.
        value_bits: 2, 3, 4, 5 or 8.
        deferred: Values are turned back after attention.
    """

    key_bits: int = 8
    value_bits: int = 3
    deferred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VlmTurbo:
    """mlx-vlm's form.

    Attributes:
        bits: One of `VLM_BITS`; of a half bit, keys have the whole below and values the one above.
    """

    bits: float


def turbo_caches(model: CausalModel, mode: KeyValueTurbo | VlmTurbo) -> tuple[Cache, ...]:
    """Empty caches of a model in a form of TurboQuant.

    Args:
        model: From `open_model`.
        mode: Which form, and its widths.

    Raises:
        RequestError: An unknown width, or a model that cannot have the form.
    """
    caches = model.make_caches()
    _check_widths(mode)
    _check_caches(caches, model.no_packed_kv)
    heads = rotated_values.HEADS if isinstance(mode, KeyValueTurbo) else unit_codec.HEADS
    if model.head_width not in heads:
        raise RequestError(
            "TurboQuant does not fit the model's heads",
            head_width=model.head_width,
            known=", ".join(map(str, heads)),
            next_step="use a KV mode such as kv8-g32",
        )
    if isinstance(mode, KeyValueTurbo):
        empty: Cache = TurboQuantCache(key_bits=mode.key_bits, value_bits=mode.value_bits, deferred=mode.deferred)
        return tuple(empty if isinstance(cache, PlainCache) else cache for cache in caches)
    coded = TurboQuantVlmCache(key_bits=int(mode.bits), value_bits=-int(-mode.bits // 1))
    last = len(caches) - 1 if len(caches) > 2 else None  # mlx-vlm takes the last layer for the most sensitive
    return tuple(
        coded if isinstance(cache, PlainCache) and place != last else cache for place, cache in enumerate(caches)
    )


def _check_widths(mode: KeyValueTurbo | VlmTurbo) -> None:
    if isinstance(mode, VlmTurbo):
        if mode.bits not in VLM_BITS:
            raise RequestError(
                "unknown width of TurboQuant in mlx-vlm's form",
                bits=mode.bits,
                known=", ".join(map(str, VLM_BITS)),
                next_step="choose one of these",
            )
    elif mode.key_bits not in affine_keys.WIDTHS or mode.value_bits not in rotated_values.WIDTHS:
        raise RequestError(
            "unknown widths of TurboQuant in its key-value-width form",
            key_bits=mode.key_bits,
            value_bits=mode.value_bits,
            known=f"keys {', '.join(map(str, affine_keys.WIDTHS))}; "
            f"values {', '.join(map(str, rotated_values.WIDTHS))}",
            next_step="choose one of each",
        )


def _check_caches(caches: Sequence[Cache], no_packed_kv: str | None) -> None:
    others = sorted({cache.kind for cache in caches if not isinstance(cache, PlainCache | RecurrentCache)})
    reason = no_packed_kv
    if any(isinstance(cache, RotatingCache) for cache in caches):
        reason = f"its caches are {', '.join(others)}; a ring is not coded in either form"
    elif others:
        reason = f"its caches are {', '.join(others)}"
    elif not any(isinstance(cache, PlainCache) for cache in caches):
        reason = "its caches are recurrent only"
    if reason is not None:
        raise RequestError(
            "the model's keys and values cannot be coded by TurboQuant", reason=reason, next_step="use the KV mode fp"
        )
