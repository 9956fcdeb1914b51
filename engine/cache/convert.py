"""The KV mode: which caches a run keeps, when they turn packed, and whether a model can have the mode at all.

The three orders of conversion are three computations (spec/kv.md section 3):

    after-forward  mlx-lm's loop: every cache is offered for conversion after each piece of the prompt and after each step,
                   once the row of logits is taken. A piece sees the earlier ones packed; row 0 of a prompt that is fed whole
                   was computed on plain keys and values.
    after-prompt   the first conversion follows the last piece of the prompt, whatever the pieces.
    from-empty     caches are packed before they hold anything; the prompt attends to packed keys and values.

Guarantees: a mode that a model cannot have is refused before its first forward, with the reason; no option is ever left
out in silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from engine.cache.per_layer import LayerWidth
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, Tiling, stand_in
from engine.cache.quantized import EmptyQuantizedCache, QuantizedCache, pack
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.cache.rotating_quantized import RotatingQuantizedCache
from engine.errors import RequestError
from engine.quantization import AFFINE_BITS, AFFINE_GROUPS
from engine.tiled_attention import TILED_BITS

Order = Literal["after-forward", "after-prompt", "from-empty"]
RING_KEEP: Final = 4  # first positions that mlx-lm's max_kv_size keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMode:
    """How keys and values are kept, and how packed ones are attended to.

    Attributes:
        bits: Width of a stored element in every cache of keys and values; None keeps them as computed.
        group_size: Elements of a head that share a scale and a bias.
        start: A cache is converted once it holds at least this many tokens.
        order: When conversion happens.
        layers: Instead of `bits`: the caches that are packed, each with its width.
        max_size: Positions of a ring in the place of every plain cache; None for no ring.
        keep: Of these, the first ones of the sequence that are never overwritten.
        tiling: Tiles of attention over packed keys; None for all positions at once.
    """

    bits: int | None = None
    group_size: int = 64
    start: int = 0
    order: Order = "after-forward"
    layers: tuple[LayerWidth, ...] = ()
    max_size: int | None = None
    keep: int = RING_KEEP
    tiling: Tiling | None = None

    @property
    def packs(self) -> bool:
        """Whether anything is packed."""
        return self.bits is not None or bool(self.layers)

    def width(self, place: int) -> tuple[int, int] | None:
        """(bits, group size) of the cache at a place; None where it is kept as computed."""
        if self.bits is not None:
            return self.bits, self.group_size
        return next(((w.bits, w.group_size) for w in self.layers if w.cache == place), None)

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Every (bits, group size) that is asked for."""
        if self.bits is not None:
            return ((self.bits, self.group_size),)
        return tuple(dict.fromkeys((w.bits, w.group_size) for w in self.layers))


def check_kv_mode(mode: KVMode, caches: Sequence[Cache], *, head_width: int, no_packed_kv: str | None) -> None:
    """Refuse a mode that the model cannot have, instead of ignoring it.

    Args:
        mode: What is asked for.
        caches: Empty ones, as the model makes them.
        head_width: Elements of a key or value head.
        no_packed_kv: The family's own reason against packing, if any.

    Raises:
        RequestError: Unknown widths, parts that contradict each other, a group that does not divide the head, or caches that
            cannot be packed, or cannot be rings.
    """
    _check_parts(mode)
    if mode.max_size is not None:
        _check_rings(mode.max_size, mode.keep, caches)
    if not mode.packs:
        return
    _check_packable(mode, caches, no_packed_kv)
    for _, group_size in mode.widths:
        if head_width % group_size:
            raise RequestError(
                "the KV mode does not fit the model's heads",
                head_width=head_width,
                group_size=group_size,
                next_step=f"choose a group size that divides {head_width}",
            )


def started(caches: Sequence[Cache], mode: KVMode) -> tuple[Cache, ...]:
    """The caches of a new run: each empty one as the mode wants it to begin, every other one as it is."""
    return tuple(_started(cache, mode, place) for place, cache in enumerate(caches))


def converted(caches: Sequence[Cache], mode: KVMode, *, prompt_done: bool = True) -> tuple[Cache, ...]:
    """Each cache of plain keys and values that is due, packed; every other one as it is.

    Args:
        caches: After a forward.
        mode: Says which are due.
        prompt_done: Whether that forward was the prompt's last one, or a later one.
    """
    if not mode.packs or (mode.order == "after-prompt" and not prompt_done):
        return tuple(caches)
    return tuple(_converted(cache, mode, place) for place, cache in enumerate(caches))


def _check_parts(mode: KVMode) -> None:
    for bits, group_size in mode.widths:
        if bits not in AFFINE_BITS or group_size not in AFFINE_GROUPS or mode.start < 0:
            raise RequestError(
                "unknown KV mode",
                bits=bits,
                group_size=group_size,
                start=mode.start,
                known=f"bits in {AFFINE_BITS}, group_size in {AFFINE_GROUPS}, start of 0 or more",
                next_step="choose one of these",
            )
    tiles = mode.tiling
    checks = {
        "one width for all caches and widths by layer exclude each other": mode.bits is not None and mode.layers,
        f"there is no order {mode.order!r}; known are {', '.join(get_args(Order))}": mode.order not in get_args(Order),
        "an order or tiles need packed keys and values": not mode.packs and (mode.order != "after-forward" or tiles),
        "caches that are packed from the first token on have no start": mode.order == "from-empty" and mode.start,
        f"tiles need widths of {TILED_BITS} bits": tiles and any(bits not in TILED_BITS for bits, _ in mode.widths),
        "a tile needs at least one position": tiles and tiles.size < 1,
    }
    if reasons := [reason for reason, broken in checks.items() if broken]:
        raise RequestError(
            "the parts of the KV mode do not go together", reason="\n".join(reasons), next_step="leave one of them out"
        )


def _check_rings(max_size: int, keep: int, caches: Sequence[Cache]) -> None:
    if not 0 <= keep < max_size:
        raise RequestError(
            "a ring needs more positions than it keeps", max_size=max_size, keep=keep, next_step="enlarge max_size"
        )
    if others := sorted({cache.kind for cache in caches if not isinstance(cache, PlainCache)}):
        raise RequestError(
            "the model's caches cannot be replaced by rings",
            reason=f"some are {', '.join(others)}; the oracle ignores max_kv_size there, without a word",
            next_step="use the KV mode fp",
        )


def _check_packable(mode: KVMode, caches: Sequence[Cache], no_packed_kv: str | None) -> None:
    def refusal(reason: str) -> RequestError:
        return RequestError(
            "the model's keys and values cannot be packed", reason=reason, next_step="use the KV mode fp"
        )

    if no_packed_kv:
        raise refusal(no_packed_kv)
    if mode.layers:
        for width in mode.layers:
            kind = caches[width.cache].kind if width.cache < len(caches) else None
            if kind is None:
                raise refusal(f"there is no cache {width.cache}: the model makes {len(caches)}")
            if not isinstance(caches[width.cache], PlainCache | RotatingCache):
                raise refusal(f"cache {width.cache} is {kind}; the oracle leaves it as it is, without a word")
        return
    unpacked = sorted({c.kind for c in caches if not isinstance(c, PlainCache | RotatingCache | RecurrentCache)})
    if unpacked or not any(isinstance(cache, PlainCache | RotatingCache) for cache in caches):
        raise refusal(f"its caches are {', '.join(unpacked) or 'recurrent only'}")


def _started(cache: Cache, mode: KVMode, place: int) -> Cache:
    if not cache.offset and (standing := stand_in(cache)):
        cache = standing.plain()
    if cache.arrays or not isinstance(cache, PlainCache | RotatingCache):
        return cache
    if mode.max_size is not None and isinstance(cache, PlainCache):
        cache = RotatingCache(max_size=mode.max_size, keep=mode.keep)
    width = mode.width(place)
    if width is None or mode.order != "from-empty":
        return cache
    if isinstance(cache, RotatingCache):
        return RotatingQuantizedCache.of(cache, bits=width[0], group_size=width[1], tiling=mode.tiling)
    return EmptyQuantizedCache(bits=width[0], group_size=width[1], tiling=mode.tiling)


def _converted(cache: Cache, mode: KVMode, place: int) -> Cache:
    width = mode.width(place)
    if width is None or cache.offset < mode.start:
        return cache
    if standing := stand_in(cache):
        packed = standing.packed(bits=width[0], group_size=width[1]) if _is_uniform(mode) else None
        if packed is not None:
            return packed
        cache = standing.plain()
    if not isinstance(cache, PlainCache | RotatingCache):
        return cache
    if cache.keys is None or cache.values is None:
        return cache
    bits, group_size = width
    if isinstance(cache, RotatingCache):
        return RotatingQuantizedCache.of(cache, bits=bits, group_size=group_size, tiling=mode.tiling)
    return QuantizedCache(
        keys=pack(cache.keys, bits=bits, group_size=group_size, tiling=mode.tiling),
        values=pack(cache.values, bits=bits, group_size=group_size, tiling=mode.tiling),
        offset=cache.offset,
    )


def _is_uniform(mode: KVMode) -> bool:
    """Whether every cache is packed alike and attended to at once: what a stand-in can stand for."""
    return mode.bits is not None and mode.tiling is None
