"""Planted faults of KV modes: each is seen by the cases that are there for it, at the row where it begins."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine import attention, tiled_attention
from engine.cache import convert, rotating_quantized
from engine.cache.rotating import RotatingCache
from engine.cache.rotating_quantized import RotatingQuantizedCache
from parity.golden import Golden, golden_path
from parity.matrix import load_cases
from tests.engine.families.committed_golden import found, needs_goldens

pytestmark = needs_goldens
Plant = pytest.MonkeyPatch

PROMPT = "llama-tiny/f32/kv8-g32-after-prompt/forced/p40-chunk7"
EMPTY = "llama-tiny/f32/kv8-g32-from-empty/forced/p40-chunk7"
RINGS = "qwen3-tiny/f32/max16-k4/forced/p40-chunk7"
PACKED_RINGS = "llama_sliding-tiny/f32/kv8-g64/forced/p40-tail-split"
TURNED = "llama_sliding-tiny/f32/kv8-g64-s44/forced/p40-tail-split"
CONFIG = "llama-tiny/f32/config-8g32_1-4g32_2/forced/p40-tail-split"
TILED = "llama-tiny/f32/kv8-g32-tiled16-lifted/forced/p40-chunk7"
SHIPPED = "llama-tiny/bf16/kv8-g64-tiled512/forced/p40-chunk7"
SINKS = "gpt_oss-tiny/f32/kv8-g64/forced/p40-tail-split"
SHARED = "gemma4_text_ple_kvshared-tiny/f32/kv8-g32-tiled16-lifted/forced/p40-chunk7"
EVERY = (PROMPT, EMPTY, RINGS, PACKED_RINGS, TURNED, CONFIG, TILED, SHIPPED, SINKS, SHARED)


def status(name: str) -> str:
    return found(name)[0]


@pytest.mark.parametrize("name", EVERY)
def test_without_a_fault_the_engine_is_the_oracle(name: str) -> None:
    assert status(name) == "IDENTICAL"


@pytest.mark.parametrize("name", [PROMPT, EMPTY])
def test_the_order_of_mlx_lms_loop_is_not_another_order(monkeypatch: Plant, name: str) -> None:
    right = convert.converted
    monkeypatch.setattr("engine.generate.started", lambda caches, _mode: tuple(caches))
    monkeypatch.setattr(
        "engine.generate.converted",
        lambda caches, mode, **_late: right(caches, replace(mode, order="after-forward")),
    )
    assert status(name) == "DIFFERENT"


@pytest.mark.parametrize("keep", [0, 3, 5])
def test_a_ring_that_keeps_fewer_or_more_is_found(monkeypatch: Plant, keep: int) -> None:
    right = convert._started

    def wrong(cache: Any, mode: Any, place: int) -> Any:
        return RotatingCache(max_size=mode.max_size, keep=keep) if not cache.arrays else right(cache, mode, place)

    monkeypatch.setattr(convert, "_started", wrong)
    assert status(RINGS) in ("DIFFERENT", "INCOMPARABLE")


def test_a_turned_ring_that_loses_its_place_is_found(monkeypatch: Plant) -> None:
    right = RotatingQuantizedCache.of

    def wrong(ring: RotatingCache, **given: Any) -> RotatingQuantizedCache:
        return right(replace(ring, index=ring.index - 1), **given)

    monkeypatch.setattr(RotatingQuantizedCache, "of", wrong)
    assert status(TURNED) == "DIFFERENT"


def test_a_ring_that_packs_other_groups_is_found(monkeypatch: Plant) -> None:
    right = rotating_quantized.pack

    def wrong(heads: mx.array, *, bits: int, group_size: int) -> Any:
        return right(heads, bits=bits, group_size=group_size // 2)

    monkeypatch.setattr(rotating_quantized, "pack", wrong)
    assert status(PACKED_RINGS) != "IDENTICAL"


def test_widths_at_the_wrong_caches_are_found(monkeypatch: Plant) -> None:
    right = convert.KVMode.width
    monkeypatch.setattr(convert.KVMode, "width", lambda self, place: right(self, {1: 2, 2: 1}.get(place, place)))
    assert status(CONFIG) in ("DIFFERENT", "INCOMPARABLE")


def test_tiles_of_another_size_are_found(monkeypatch: Plant) -> None:
    right = attention.attend_tiled
    monkeypatch.setattr(
        attention,
        "attend_tiled",
        lambda *heads, tiling, **given: right(*heads, tiling=replace(tiling, size=17), **given),
    )
    assert status(TILED) == "DIFFERENT"


@pytest.mark.parametrize("name", [TILED, SHIPPED])
def test_attention_over_all_positions_at_once_is_not_tiled_attention(monkeypatch: Plant, name: str) -> None:
    def whole(*heads: Any, tiling: object, **given: Any) -> mx.array:
        del tiling
        return attention.attend_packed(*heads, **given)

    monkeypatch.setattr(attention, "attend_tiled", whole)
    assert status(name) == "DIFFERENT"


def test_a_running_sum_that_is_not_corrected_is_found(monkeypatch: Plant) -> None:
    right = tiled_attention._folded

    def wrong(state: Any, scores: mx.array, values: Any) -> Any:
        peak, row_sum, out = right(state, scores, values)
        if state is not None:
            row_sum = state[1] + mx.sum(mx.exp(scores - peak), axis=-1, keepdims=True)
        return peak, row_sum, out

    monkeypatch.setattr(tiled_attention, "_folded", wrong)
    assert status(TILED) == "DIFFERENT"


def test_sinks_that_are_left_out_are_found(monkeypatch: Plant) -> None:
    right = attention.attend_packed

    def wrong(*heads: Any, sinks_H: object = None, **given: Any) -> mx.array:
        del sinks_H
        return right(*heads, **given)

    monkeypatch.setattr(attention, "attend_packed", wrong)
    assert status(SINKS) == "DIFFERENT"


def test_tiles_in_layers_that_read_anothers_keys_are_found(monkeypatch: Plant) -> None:
    monkeypatch.setattr("engine.shared_kv_attention._untiled", lambda heads: heads)
    assert status(SHARED) == "DIFFERENT"


def rows(name: str, oracle: str) -> list[str]:
    case = next(c for c in load_cases() if c.name == name)
    version = {"mlx-lm": "0.32.2", "mlx-optiq": "0.7.7"}[oracle]
    digests = Golden.load(golden_path(case, version=version)).digests
    return [digest for tensor, digest in digests.items() if tensor.startswith("logits/")]


def test_fed_whole_two_orders_are_one_in_the_oracle_too() -> None:
    after_forward = rows("llama-tiny/f32/kv4-g64/forced/p40-whole", "mlx-lm")
    after_prompt = rows("llama-tiny/f32/kv4-g64-after-prompt/forced/p40-whole", "mlx-lm")
    assert after_forward == after_prompt
    split = rows("llama-tiny/f32/kv4-g64/forced/p40-tail-split", "mlx-lm")
    assert split[0] != after_prompt[0]


def test_the_second_oracle_converts_as_the_first_where_nothing_turns() -> None:
    first = rows("llama-tiny/f32/kv8-g64/forced/p40-whole", "mlx-lm")
    assert first == rows("llama-tiny/f32/kv8-g64-after-prompt/forced/p40-whole", "mlx-optiq")


def test_converted_after_the_prompt_row_0_is_that_of_plain_keys() -> None:
    plain = rows("llama-tiny/f32/fp/forced/p40-whole", "mlx-lm")
    late = rows("llama-tiny/f32/config-8g64_0-6g32_1-4g64_3-2g32_2/forced/p40-whole", "mlx-optiq")
    assert plain[0] == late[0]
    assert plain[1] != late[1]
