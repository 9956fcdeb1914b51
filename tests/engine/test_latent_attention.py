"""Latent attention: both of its forms are one formula, and what it cannot be is refused."""

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.cache.plain import PlainCache
from engine.cache.recurrent import RecurrentCache
from engine.errors import ConfigError
from engine.latent_attention import (
    HeadLinear,
    LatentHeads,
    allowed_positions,
    as_latents,
    check_latent_sizes,
    latent_scale,
)
from engine.linear import Linear, Packed
from engine.norm import RMSNorm
from engine.quantization import Format

D, H, C, N, R, E = 24, 2, 16, 8, 4, 6
Normal = Callable[..., mx.array]
Exact = npt.NDArray[np.float64]


@pytest.fixture
def heads(normal: Normal) -> LatentHeads:
    return LatentHeads(
        down=Linear(path="down", weight=normal(1, (C + R, D))),
        norm=RMSNorm(path="norm", weight=normal(2, (C,)), eps=1e-6),
        key=HeadLinear(path="key", weight=normal(3, (H, C, N))),
        value=HeadLinear(path="value", weight=normal(4, (H, E, C))),
        out=Linear(path="out", weight=normal(5, (D, H * E))),
    )


def exact(array: mx.array) -> Exact:
    return np.array(array).astype(np.float64)


def formula(heads: LatentHeads, own: mx.array, shared: mx.array, latents: mx.array, keys: mx.array) -> Exact:
    """The last query's output in float64, every position seen."""
    wk, wv, out = (exact(part.weight) for part in (heads.key, heads.value, heads.out))  # type: ignore[arg-type]
    k, v = exact(latents)[0, 0] @ wk, exact(latents)[0, 0] @ wv.swapaxes(1, 2)
    scores = np.einsum("hn,htn->ht", exact(own)[0, :, -1], k) + exact(shared)[0, :, -1] @ exact(keys)[0, 0].T
    shares = np.exp(0.1 * scores - (0.1 * scores).max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    answer: Exact = np.einsum("ht,hte->he", shares, v).reshape(-1) @ out.T
    return answer


def test_absorbed_and_reconstructed_are_one_formula_and_not_one_rounding(
    heads: LatentHeads, normal: Normal, other_bits: Callable[..., None]
) -> None:
    own, shared = normal(6, (1, H, 3, N)), normal(7, (1, H, 3, R))
    latents, keys = normal(8, (1, 1, 9, C)), normal(9, (1, 1, 9, R))
    reconstructed = heads.attend(own, shared, latents, keys, scale=0.1, allowed=allowed_positions(3, before=6))
    absorbed = heads.attend(own[:, :, -1:], shared[:, :, -1:], latents, keys, scale=0.1, allowed=None)
    expected = formula(heads, own, shared, latents, keys)
    size = np.abs(expected).max()
    assert np.abs(exact(reconstructed)[0, -1] - expected).max() < 1e-5 * size  # describes; nothing is judged by it
    assert np.abs(exact(absorbed)[0, -1] - expected).max() < 1e-5 * size
    other_bits(reconstructed[:, -1:], absorbed)


def test_a_position_that_is_not_allowed_does_not_count(
    heads: LatentHeads, normal: Normal, same_bits: Callable[..., None]
) -> None:
    own, shared = normal(6, (1, H, 3, N)), normal(7, (1, H, 3, R))
    latents, keys = normal(8, (1, 1, 3, C)), normal(9, (1, 1, 3, R))
    allowed = allowed_positions(3, before=0)
    other = mx.concatenate([latents[:, :, :2], normal(10, (1, 1, 1, C))], axis=2)
    one, two = (heads.attend(own, shared, held, keys, scale=0.1, allowed=allowed) for held in (latents, other))
    same_bits(one[:, :2], two[:, :2])


def test_a_single_query_sees_all_and_several_the_past() -> None:
    assert allowed_positions(1, before=5) is None
    assert np.array(allowed_positions(2, before=1)).tolist() == [[True, True, False], [True, True, True]]


def test_what_is_cached_is_one_latent_and_one_key_a_position(heads: LatentHeads, normal: Normal) -> None:
    latents, keys = heads.compress(normal(11, (1, 5, D)))
    assert (latents.shape, keys.shape) == ((1, 1, 5, C), (1, 1, 5, R))


def test_packed_heads_multiply_both_ways_with_their_own_values(normal: Normal) -> None:
    dense = normal(12, (H, 32, 64))
    words, scales, biases = mx.quantize(dense, group_size=32, bits=8)
    values = exact(mx.dequantize(words, scales, biases, group_size=32, bits=8))
    packed = Packed(weight=words, scales=scales, biases=biases, format=Format(bits=8, group_size=32))
    layer = HeadLinear(path="h", weight=packed)
    x, y = normal(13, (1, H, 4, 64)), normal(14, (1, 1, 4, 32))
    assert np.abs(exact(layer(x)) - exact(x) @ values.swapaxes(1, 2)).max() < 1e-4
    assert np.abs(exact(layer.back(y)) - exact(y) @ values).max() < 1e-4


def test_the_scale_is_yarns_temperature_squared_over_the_root() -> None:
    yarn = {"mscale_all_dim": 1.0, "factor": 40}
    assert (
        latent_scale(64, None) == latent_scale(64, {**yarn, "factor": 1}) == latent_scale(64, {"factor": 40}) == 0.125
    )
    temperature = 0.1 * math.log(40) + 1
    assert latent_scale(64, yarn) == 0.125 * temperature * temperature


def test_another_kind_of_cache_is_an_error() -> None:
    assert as_latents(PlainCache()).offset == 0
    with pytest.raises(TypeError, match="a layer of latent attention was handed a cache of kind arrays-4"):
        as_latents(RecurrentCache.empty(4))


@pytest.mark.parametrize("wrong", [{"heads": 0}, {"qk_rope_head_dim": 3}, {"index_head_dim": 2}])
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    sizes = {"heads": 2, "qk_rope_head_dim": 4, "index_head_dim": 4}
    check_latent_sizes(**sizes)
    wrong_sizes = {**sizes, **wrong}
    with pytest.raises(ConfigError) as caught:
        check_latent_sizes(**wrong_sizes)
    assert str(caught.value) == (
        "the sizes of config.json do not fit together\n"
        f"  heads             {wrong_sizes['heads']}\n"
        f"  index head dim    {wrong_sizes['index_head_dim']}\n"
        f"  qk rope head dim  {wrong_sizes['qk_rope_head_dim']}\n"
        "  next              mend config.json"
    )
