"""KV modes through the loop: the three orders are three computations, and a mode that does not fit is refused at once."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode
from engine.cache.per_layer import LayerWidth
from engine.cache.protocol import Tiling
from engine.errors import RequestError
from engine.generate import Feed, Step, forced, steps
from engine.model import CausalModel

Check = Callable[..., None]
Open = Callable[..., CausalModel]

PROMPT, IDS = [5, 9, 2, 77, 31, 8, 4, 100, 3], [7, 7, 50]
FEEDS = {"whole": Feed(whole=True), "split": Feed(piece=4)}


def run(model: CausalModel, kv: KVMode, feed: str = "split") -> list[Step]:
    return list(steps(model, PROMPT, num_steps=3, pick=forced(IDS), feed=FEEDS[feed], kv=kv))


def mode(order: Any = "after-forward", **parts: Any) -> KVMode:
    return KVMode(bits=4, group_size=32, order=order, **parts)


def test_the_three_orders_are_three_computations(llama: Open, other_bits: Check) -> None:
    rows = [run(llama(), mode(order))[0].logits_BV for order in ("after-forward", "after-prompt", "from-empty")]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        other_bits(rows[i], rows[j])


def test_after_the_prompt_the_first_row_is_that_of_plain_keys(llama: Open, same_bits: Check, other_bits: Check) -> None:
    plain, late = run(llama(), KVMode()), run(llama(), mode("after-prompt"))
    same_bits(plain[0].logits_BV, late[0].logits_BV)
    other_bits(plain[1].logits_BV, late[1].logits_BV)
    assert {cache.kind for cache in late[0].caches} == {"quantized-b4-g32"}


def test_a_prompt_that_is_fed_whole_knows_no_difference_of_the_first_two(llama: Open, same_bits: Check) -> None:
    for one, other in zip(run(llama(), mode(), "whole"), run(llama(), mode("after-prompt"), "whole"), strict=True):
        same_bits(one.logits_BV, other.logits_BV)


def test_widths_by_layer_of_one_width_are_that_width(llama: Open, same_bits: Check, other_bits: Check) -> None:
    layers = tuple(LayerWidth(cache=place, bits=4, group_size=32) for place in range(2))
    for one, other in zip(run(llama(), mode()), run(llama(), KVMode(layers=layers)), strict=True):
        same_bits(one.logits_BV, other.logits_BV)
    half = run(llama(), KVMode(layers=layers[:1]))
    assert [cache.kind for cache in half[0].caches] == ["quantized-b4-g32", "plain"]
    other_bits(run(llama(), mode())[0].logits_BV, half[0].logits_BV)


def test_a_ring_that_never_turns_is_a_plain_cache(llama: Open, same_bits: Check, other_bits: Check) -> None:
    plain = run(llama(), KVMode())
    for one, other in zip(plain, run(llama(), KVMode(max_size=64)), strict=True):
        same_bits(one.logits_BV, other.logits_BV)
    other_bits(plain[0].logits_BV, run(llama(), KVMode(max_size=6))[0].logits_BV)


def test_tiles_run_where_the_mode_says_so(llama: Open, other_bits: Check) -> None:
    whole, tiled = (run(llama(), mode(tiling=tiling)) for tiling in (None, Tiling(size=4, lifted=True)))
    other_bits(whole[0].logits_BV, tiled[0].logits_BV)
    assert mx.abs(whole[0].logits_BV - tiled[0].logits_BV).max().item() < 1e-4


def test_tiles_that_the_models_dtype_does_not_have_are_refused_before_any_forward(llama: Open) -> None:
    kv = mode(tiling=Tiling())
    with pytest.raises(RequestError, match="queries of this dtype are not tiled"):
        steps(llama(), PROMPT, num_steps=1, kv=kv)  # not iterated over: nothing has run
    assert list(steps(llama("bf16"), PROMPT, num_steps=1, kv=kv))


@pytest.mark.parametrize("kv", [mode("from-empty"), mode(), KVMode(max_size=6, bits=8, group_size=32)])
def test_a_run_goes_on_where_it_was_left(llama: Open, same_bits: Check, kv: KVMode) -> None:
    model = llama()
    through = run(model, kv)
    again = steps(model, [IDS[0]], num_steps=1, kv=kv, caches=through[0].caches, feed=FEEDS["whole"])
    same_bits(through[1].logits_BV, next(iter(again)).logits_BV)
