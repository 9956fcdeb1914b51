"""The sparse indexer: cheap scores of all earlier positions, of which a query then attends to the best few only.

It has heads and keys of its own, one key a position, and keeps those keys in a plain cache of its own (with zeros for values,
which nothing reads). While no more positions exist than are kept it selects nothing, and the layer attends to all.

Source: spec/models.md section 7; DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.1.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.checkpoint import Checkpoint
from engine.latent_attention import as_latents
from engine.linear import Linear
from engine.norm import LayerNorm
from engine.rope import Rope
from engine.taps import tap

KEY_EPS: Final = 1e-5  # the oracle's; the published model has 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Indexer:
    """Scores sum_h w_h relu(q_h . k), and the positions where they are highest.

    Attributes:
        path: Module path in the checkpoint; selected positions [B, L, 1, kept] are its tap, and no tap where none are selected.
        q: From the narrow layer of the queries [H * E, R].
        k: [E, D].
        norm: Of a key.
        weights: A weight a head and query [H, D].
        rope: Turns the first elements of a query's head and of a key.
        heads: H.
        kept: Positions that a query attends to.
    """

    path: str
    q: Linear
    k: Linear
    norm: LayerNorm
    weights: Linear
    rope: Rope
    heads: int
    kept: int

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        width: int,
        rank: int,
        heads: int,
        head_width: int,
        kept: int,
        rope: Rope,
    ) -> "Indexer":
        """Take `wq_b`, `wk`, `k_norm` and `weights_proj` from the checkpoint.

        Args:
            checkpoint: Where from.
            path: Module path.
            width: D.
            rank: R, width of the narrow layer of the queries.
            heads: H.
            head_width: E.
            kept: Positions to select.
            rope: Of the indexer.
        """
        return cls(
            path=path,
            q=Linear.take(checkpoint, f"{path}.wq_b", inputs=rank, outputs=heads * head_width),
            k=Linear.take(checkpoint, f"{path}.wk", inputs=width, outputs=head_width),
            norm=LayerNorm.take(checkpoint, f"{path}.k_norm", width=head_width, eps=KEY_EPS),
            weights=Linear.take(checkpoint, f"{path}.weights_proj", inputs=width, outputs=heads),
            rope=rope,
            heads=heads,
            kept=kept,
        )

    def __call__(
        self, x_BLD: mx.array, narrow_BLR: mx.array, cache: PlainCache, *, allowed: mx.array | None
    ) -> tuple[mx.array | None, PlainCache]:
        """Select positions for L queries.

        Args:
            x_BLD: The layer's input.
            narrow_BLR: The narrow layer of the queries.
            cache: Keys so far.
            allowed: Boolean [L, T]; None where every query may see every position.

        Returns:
            Positions [B, 1, L, kept], in the order in which mlx's partition leaves them, or None where no more than `kept`
            exist; and the longer cache. A query that may see fewer than `kept` selects positions that it may not see as well:
            the mask still decides.

        Numerics: every operation rounds to x's dtype. The heads' weighted scores are added one by one for several queries, and
            by one sum (float32 inside) for a single query: as in the oracle, the two round differently in 16 bits.
        """
        B, L, _ = x_BLD.shape
        q_BHLE = self.rope(self.q(narrow_BLR).reshape(B, L, self.heads, -1).swapaxes(1, 2), cache.offset)
        k_B1LE = self.rope(mx.expand_dims(self.norm(self.k(x_BLD)), 1), cache.offset)
        cache, keys_B1TE, _ = cache.append(k_B1LE, mx.zeros_like(k_B1LE))
        weights_BLH = self.weights(x_BLD)
        if keys_B1TE.shape[2] <= self.kept:
            return None, cache
        weights_BHL1 = (weights_BLH * (self.heads**-0.5 * k_B1LE.shape[-1] ** -0.5)).swapaxes(1, 2)[..., None]
        scores_BHLT = mx.maximum(q_BHLE @ keys_B1TE.swapaxes(-1, -2), 0) * weights_BHL1
        if L > 1:
            scores_B1LT = functools.reduce(operator.add, mx.split(scores_BHLT, self.heads, axis=1))
        else:
            scores_B1LT = scores_BHLT.sum(axis=1, keepdims=True)
        if allowed is not None:
            scores_B1LT = mx.where(allowed, scores_B1LT, -mx.inf)
        selected_B1LS = mx.argpartition(scores_B1LT, kth=-self.kept, axis=-1)[..., -self.kept :]
        tap(self.path, selected_B1LS.swapaxes(1, 2))
        return selected_B1LS, cache


def latents_and_index(cache: Cache) -> tuple[PlainCache, PlainCache]:
    """The two members of a sparse layer's group: latents, and the indexer's keys.

    Raises:
        TypeError: It is no such group; the family handed a layer the wrong kind.
    """
    if not isinstance(cache, CacheGroup) or len(cache.members) != 2:
        raise TypeError(f"a layer of sparse attention was handed a cache of kind {cache.kind}")
    latents, index = cache.members
    return as_latents(latents), as_latents(index)


def only_selected(
    latents_B1TC: mx.array, keys_B1TR: mx.array, selected_B1LS: mx.array, *, allowed: mx.array | None
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Restrict attention to the selected positions.

    Args:
        latents_B1TC: Latents of all positions.
        keys_B1TR: The shared parts of their keys.
        selected_B1LS: Positions, from the indexer.
        allowed: Boolean [L, T], or None.

    Returns:
        Latents, keys and mask to attend with: for a single query the selected rows alone, in the order of the selection, which
        is the order of the sums; for several, all rows and a mask [B, 1, L, T].
    """
    if selected_B1LS.shape[2] == 1:
        rows_B1S1 = selected_B1LS.swapaxes(2, 3)
        latents, keys = (
            mx.take_along_axis(rows, mx.broadcast_to(rows_B1S1, (*rows_B1S1.shape[:3], rows.shape[-1])), axis=2)
            for rows in (latents_B1TC, keys_B1TR)
        )
        return latents, keys, None
    B, _, L, _ = selected_B1LS.shape
    none_B1LT = mx.zeros((B, 1, L, latents_B1TC.shape[2]), dtype=mx.bool_)
    chosen_B1LT = mx.put_along_axis(none_B1LT, selected_B1LS, mx.array(True), axis=-1)
    return latents_B1TC, keys_B1TR, chosen_B1LT if allowed is None else chosen_B1LT & allowed
