"""Attention whose keys and values later layers may read: learned norms on queries and keys, a bare one on values.

A layer with keys of its own appends them to its cache and hands on what its queries saw; a layer without takes over what
an earlier one handed on, positions and mask included, and has no cache. Scores are not scaled: the norms do that.
Gemma 3n and Gemma 4 attend so. Source: spec/models.md section 5.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, Heads, KVCache, PackedHeads, as_kv, positions
from engine.cache.rotating import RotatingCache
from engine.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.linear import Linear
from engine.mask import Mask
from engine.norm import RMSNorm
from engine.rope import Rope
from engine.taps import tap

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def donors(kinds: Sequence[str], *, shared: int) -> tuple[int, ...]:
    """For each layer the one whose keys and values it reads: itself, or the last of its kind that has its own.

    Args:
        kinds: `full_attention` or `sliding_attention`, one a layer.
        shared: Layers, at the end, without keys and values of their own.

    Raises:
        ConfigError: A kind is neither, or a layer at the end has no donor.
    """
    own = len(kinds) - shared
    if set(kinds) - {FULL, SLIDING} or not 0 <= shared <= len(kinds) or set(kinds) - set(kinds[: max(own, 0)]):
        raise ConfigError(
            "the layers of config.json do not fit together",
            layer_types=", ".join(kinds) or "none",
            num_kv_shared_layers=shared,
            known=f"{FULL} and {SLIDING}; the last layers read the keys and values of an earlier one of their kind",
            next_step="mend config.json",
        )
    return tuple(max(j for j in range(min(i + 1, own)) if kinds[j] == kind) for i, kind in enumerate(kinds))


def unread(layers: str, *, own: int, total: int) -> dict[str, str]:
    """What a checkpoint may hold of the layers without keys of their own: patterns of names, each with the reason.

    Args:
        layers: Path of the layers.
        own: Layers, from the first, that have their own.
        total: All layers.
    """
    path = re.escape(layers)
    reason = "the layer reads the keys and values of an earlier one"
    return {rf"{path}\.{i}\.self_attn\.(k_proj|v_proj|k_norm)\..*": reason for i in range(own, total)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenKV:
    """What the queries of one forward saw.

    Attributes:
        keys: All positions that the cache gave out.
        values: Likewise.
        mask: Of the new positions over them.
        offset: Position of the first new token; one a row, [B], in a batch.
    """

    keys: Heads
    values: Heads
    mask: Mask
    offset: int | mx.array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnKV:
    """The projections of a layer with keys and values of its own.

    Attributes:
        k: [K * E, D].
        v: [K * E, D], or None where the projected keys, before their norm, serve as values.
        k_norm: Over a head.
        value_eps: Of the values' norm, which has no weight.
    """

    k: Linear
    v: Linear | None
    k_norm: RMSNorm
    value_eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedKVAttention:
    """Grouped-query self-attention.

    Attributes:
        path: Module path in the checkpoint.
        q: [H * E, D].
        o: [D, H * E].
        q_norm: Over a head.
        own: None in a layer that reads an earlier one's keys and values.
        rope: Rotation of queries and keys.
        head_width: E.
        window: Positions that the layer sees; None for all.
    """

    path: str
    q: Linear
    o: Linear
    q_norm: RMSNorm
    own: OwnKV | None
    rope: Rope
    head_width: int
    window: int | None

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        eps: float,
        rope: Rope,
        window: int | None,
        has_own: bool,
        keys_as_values: bool = False,
    ) -> "SharedKVAttention":
        """Take the projections and norms that the layer has from the checkpoint."""
        D, E = width, head_width

        def kv(name: str) -> Linear:
            return Linear.take(checkpoint, f"{path}.{name}", inputs=D, outputs=kv_heads * E)

        def norm(name: str) -> RMSNorm:
            return RMSNorm.take(checkpoint, f"{path}.{name}", width=E, eps=eps)

        own = None
        if has_own:
            v = None if keys_as_values else kv("v_proj")
            own = OwnKV(k=kv("k_proj"), v=v, k_norm=norm("k_norm"), value_eps=eps)
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.q_proj", inputs=D, outputs=heads * E),
            o=Linear.take(checkpoint, f"{path}.o_proj", inputs=heads * E, outputs=D),
            q_norm=norm("q_norm"),
            own=own,
            rope=rope,
            head_width=E,
            window=window,
        )

    def make_cache(self) -> Cache | None:
        """An empty cache; None in a layer without keys of its own."""
        if self.own is None:
            return None
        return PlainCache() if self.window is None else RotatingCache(max_size=self.window)

    def __call__(
        self, x_BLD: mx.array, cache: Cache | None, donated: SeenKV | None
    ) -> tuple[mx.array, Cache | None, SeenKV]:
        """Attend from [B, L, D].

        Args:
            x_BLD: Normalised input.
            cache: Of a layer with keys of its own, else None.
            donated: Of a layer without, else None.

        Returns:
            The output [B, L, D], the longer cache if there is one, and what the queries saw.

        Raises:
            TypeError: The layer was given the other one of the two.
        """
        if self.own is not None and cache is not None:
            seen, cache = self._append(self.own, x_BLD, as_kv(cache))
        elif self.own is None and cache is None and donated is not None:
            seen = donated
        else:
            raise TypeError(f"{self.path} needs {'donated keys and values' if self.own is None else 'a cache'}")
        return tap(self.path, self._attend(x_BLD, seen)), cache, seen

    def _append(self, own: OwnKV, x_BLD: mx.array, cache: KVCache) -> tuple[SeenKV, KVCache]:
        """Keys and values of x added to the cache: what queries may now see, and the longer cache."""
        heads = (*x_BLD.shape[:2], -1, self.head_width)
        k_BLKE = own.k(x_BLD).reshape(heads)
        v_BLKE = k_BLKE if own.v is None else own.v(x_BLD).reshape(heads)
        mask, offset = cache.mask(x_BLD.shape[1], window=self.window), positions(cache)
        k_BKLE = self.rope(own.k_norm(k_BLKE).swapaxes(1, 2), offset)
        v_BKLE = mx.fast.rms_norm(v_BLKE, None, own.value_eps).swapaxes(1, 2)
        cache, keys, values = cache.append(k_BKLE, v_BKLE)
        return SeenKV(keys=keys, values=values, mask=mask, offset=offset), cache

    def _attend(self, x_BLD: mx.array, seen: SeenKV) -> mx.array:
        B, L, _ = x_BLD.shape
        q_BLHE = self.q_norm(self.q(x_BLD).reshape(B, L, -1, self.head_width))
        q_BHLE = self.rope(q_BLHE.swapaxes(1, 2), seen.offset)
        keys, values = (
            (seen.keys, seen.values) if self.own is not None else (_untiled(seen.keys), _untiled(seen.values))
        )
        out_BHLE = attend(q_BHLE, keys, values, scale=1.0, mask=seen.mask)
        return self.o(out_BHLE.swapaxes(1, 2).reshape(B, L, -1))


def _untiled(heads: Heads) -> Heads:
    """The same keys or values, all positions at once: the oracle tiles them in the layer that owns them alone."""
    return replace(heads, tiling=None) if isinstance(heads, PackedHeads) else heads
