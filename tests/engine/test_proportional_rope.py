"""Proportional scaling: the first pairs turn as they would in a whole head, the others do not turn at all."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.errors import ConfigError
from engine.rope import default_periods, make_rope

PARTIAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


def test_the_first_pairs_have_the_periods_of_the_whole_head(same_bits: Callable[..., None]) -> None:
    periods = make_rope(64, base=1e6, scaling=PARTIAL).periods
    assert periods is not None
    same_bits(periods[:8], default_periods(64, base=1e6)[:8])
    assert periods[8:].tolist() == [float("inf")] * 24


def test_a_factor_slows_them(same_bits: Callable[..., None]) -> None:
    plain, slowed = (make_rope(64, base=1e6, scaling={**PARTIAL, "factor": f}).periods for f in (1.0, 4.0))
    assert plain is not None
    same_bits(plain * 4.0, slowed)


def test_pairs_that_do_not_turn_keep_their_bits(
    normal: Callable[..., mx.array], same_bits: Callable[..., None]
) -> None:
    x = normal(0, (1, 2, 5, 64))
    turned = make_rope(64, base=1e6, scaling=PARTIAL)(x, 7)
    same_bits(x[..., 8:32], turned[..., 8:32])  # pairs are (i, i + 32): the first eight of them turn
    same_bits(x[..., 40:], turned[..., 40:])
    assert not mx.array_equal(x[..., :8], turned[..., :8]).item()
    assert not mx.array_equal(x[..., 32:40], turned[..., 32:40]).item()


def test_the_whole_head_is_the_default(same_bits: Callable[..., None]) -> None:
    whole = make_rope(64, base=1e4, scaling={"rope_type": "proportional"})
    assert whole.periods is not None
    same_bits(whole.periods, default_periods(64, base=1e4))


def test_more_than_the_whole_head_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_rope(64, base=1e4, scaling={**PARTIAL, "partial_rotary_factor": 1.5})
    assert str(caught.value) == (
        "rope scaling 'proportional' turns more than the whole head\n"
        "  partial rotary factor  1.5\n"
        "  next                   mend rope_scaling in config.json"
    )
