"""The sparse indexer: it selects the best positions that exist, and attention then sees no others."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.latent_attention import allowed_positions
from engine.linear import Linear
from engine.norm import LayerNorm
from engine.rope import Rope
from engine.sparse_indexer import KEY_EPS, Indexer, latents_and_index, only_selected
from engine.taps import watching

D, R, H, E, KEPT = 12, 8, 2, 8, 4
Normal = Callable[..., mx.array]


@pytest.fixture
def indexer(normal: Normal) -> Indexer:
    return Indexer(
        path="indexer",
        q=Linear(path="q", weight=normal(1, (H * E, R))),
        k=Linear(path="k", weight=normal(2, (E, D))),
        norm=LayerNorm(path="norm", weight=normal(3, (E,)), bias=normal(4, (E,)), eps=KEY_EPS),
        weights=Linear(path="weights", weight=normal(5, (H, D))),
        rope=Rope(width=4, base=100.0),
        heads=H,
        kept=KEPT,
    )


def scores(indexer: Indexer, x: mx.array, narrow: mx.array) -> np.ndarray:
    """Scores [L, L] of a whole sequence in float64, turned in float32."""
    L = x.shape[1]
    q = np.array(indexer.rope(indexer.q(narrow).reshape(1, L, H, E).swapaxes(1, 2), 0)).astype(np.float64)[0]
    k = np.array(indexer.rope(indexer.norm(indexer.k(x))[:, None], 0)).astype(np.float64)[0, 0]
    w = np.array(indexer.weights(x)).astype(np.float64)[0]
    return np.einsum("hlt,lh->lt", np.maximum(q @ k.T, 0), w)


def test_nothing_is_selected_while_no_more_exist_than_are_kept(indexer: Indexer, normal: Normal) -> None:
    x, narrow = normal(6, (1, KEPT, D)), normal(7, (1, KEPT, R))
    selected, cache = indexer(x, narrow, PlainCache(), allowed=allowed_positions(KEPT, before=0))
    assert selected is None
    assert (cache.offset, cache.kind) == (KEPT, "plain")


@pytest.mark.parametrize("cut", [0, 9])
def test_the_best_positions_of_the_past_are_selected(indexer: Indexer, normal: Normal, cut: int) -> None:
    L = 10
    x, narrow = normal(6, (1, L, D)), normal(7, (1, L, R))
    cache = PlainCache()
    if cut:
        _, cache = indexer(x[:, :cut], narrow[:, :cut], cache, allowed=allowed_positions(cut, before=0))
    rest = L - cut
    selected, cache = indexer(x[:, cut:], narrow[:, cut:], cache, allowed=allowed_positions(rest, before=cut))
    assert selected is not None
    assert selected.shape == (1, 1, rest, KEPT)
    assert cache.offset == L
    expected = scores(indexer, x, narrow)
    for query, own in zip(range(cut, L), np.array(selected)[0, 0], strict=True):
        past = expected[query, : query + 1]
        taken = [i for i in own.tolist() if i <= query]
        assert len(set(own.tolist())) == KEPT
        assert sorted(past[taken]) == sorted(past)[-KEPT:]  # by score: several may be nought


@pytest.mark.parametrize("L", [KEPT, KEPT + 1])
def test_a_selection_is_shown_with_its_positions_second_and_none_where_none_is_made(
    indexer: Indexer, normal: Normal, same_bits: Callable[..., None], L: int
) -> None:
    seen: dict[str, mx.array] = {}
    with watching(seen.__setitem__):
        selected, _ = indexer(normal(6, (1, L, D)), normal(7, (1, L, R)), PlainCache(), allowed=None)
    assert ("indexer" in seen) == (L > KEPT) == (selected is not None)
    if selected is not None:
        assert (seen["indexer"].shape, seen["indexer"].dtype) == ((1, L, 1, KEPT), mx.uint32)
        same_bits(selected[:, :, -1], seen["indexer"][:, -1])


def test_a_single_query_attends_to_the_selected_rows_in_their_order(
    normal: Normal, same_bits: Callable[..., None]
) -> None:
    latents, keys = normal(8, (1, 1, 9, 5)), normal(9, (1, 1, 9, 3))
    order = [7, 0, 4]
    seen, turned, allowed = only_selected(latents, keys, mx.array([[[order]]]), allowed=None)
    assert allowed is None
    same_bits(latents[:, :, mx.array(order)], seen)
    same_bits(keys[:, :, mx.array(order)], turned)


def test_several_queries_attend_to_what_is_selected_and_allowed(normal: Normal) -> None:
    latents, keys = normal(8, (1, 1, 3, 5)), normal(9, (1, 1, 3, 3))
    selected = mx.array([[[[0, 2], [0, 1]]]])
    seen, _, mask = only_selected(latents, keys, selected, allowed=allowed_positions(2, before=1))
    assert seen is latents
    assert np.array(mask).tolist() == [[[[True, False, False], [True, True, False]]]]
    _, _, mask = only_selected(latents, keys, selected, allowed=None)
    assert np.array(mask).tolist() == [[[[True, False, True], [True, True, False]]]]


def test_another_cache_is_an_error() -> None:
    latents, index = latents_and_index(CacheGroup(members=(PlainCache(), PlainCache())))
    assert (latents.offset, index.offset) == (0, 0)
    for cache in (PlainCache(), CacheGroup(members=(PlainCache(),))):
        with pytest.raises(TypeError, match=r"a layer of sparse attention was handed a cache of kind (list\[)?plain"):
            latents_and_index(cache)
