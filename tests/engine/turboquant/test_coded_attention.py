"""Heads in a code attend by themselves, and what they cannot do is refused where it would go wrong in silence."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.attention import attend
from engine.cache.turboquant import TurboQuantCache
from engine.cache.turboquant_vlm import TurboQuantVlmCache

Normal = Callable[..., mx.array]


@pytest.fixture
def new(normal: Normal) -> mx.array:
    return normal(1, (1, 2, 5, 64))


@pytest.mark.parametrize(
    "cache",
    [TurboQuantCache(key_bits=8, value_bits=8, deferred=True), TurboQuantVlmCache(key_bits=8, value_bits=8)],
    ids=lambda cache: cache.kind,
)
@pytest.mark.parametrize("L", [1, 3])
def test_attention_over_codes_of_8_bits_is_nearly_attention(
    normal: Normal, new: mx.array, cache: TurboQuantCache | TurboQuantVlmCache, L: int
) -> None:
    q_BHLE = normal(2, (1, 4, L, 64))
    mask = "causal" if L > 1 else None
    _, keys, values = cache.append(new, new)
    exact = attend(q_BHLE, new, new, scale=0.125, mask=mask)  # type: ignore[arg-type]
    coded = attend(q_BHLE, keys, values, scale=0.125, mask=mask)  # type: ignore[arg-type]
    assert 0 < mx.abs(coded - exact).max().item() < 0.05


def test_half_coded_heads_are_refused(new: mx.array) -> None:
    _, keys, values = TurboQuantVlmCache(key_bits=4, value_bits=4).append(new, new)
    with pytest.raises(TypeError, match="values are coded beside keys that are not"):
        attend(new, new, values, scale=1.0, mask=None)
    with pytest.raises(TypeError, match="keys and values must both be coded, or neither"):
        attend(new, keys, new, scale=1.0, mask=None)
    _, rotated, _ = TurboQuantCache(key_bits=8, value_bits=3, deferred=True).append(new, new)
    with pytest.raises(TypeError, match="rotated attention needs rotated values"):
        attend(new, rotated, values, scale=1.0, mask=None)


def test_sinks_are_refused(new: mx.array) -> None:
    _, keys, values = TurboQuantVlmCache(key_bits=4, value_bits=4).append(new, new)
    with pytest.raises(TypeError, match="attention sinks need plain or packed keys and values"):
        attend(new, keys, values, scale=1.0, mask=None, sinks_H=mx.zeros((2,)))
