"""The fused step gives the bits of plain operations however a prompt comes, on forks, and where it must step aside."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.convert import KVMode
from engine.cache.plain import PlainCache
from engine.cache.protocol import settled
from engine.families.qwen3_moe import ExpertMLP
from engine.generate import Feed, forced, steps
from engine.kernels.driver import Driver, Form, shape_of
from engine.kernels.families import FAMILIES, plan_of
from engine.kernels.fused import FusedModel
from engine.kernels.history import FusedCache
from engine.kernels.level import Kernels
from engine.kernels.part_list import alike
from engine.kernels.plan import NotFusedError
from engine.kernels.program import build_program
from engine.kernels.step import StepCode
from engine.model import CausalModel, FastCaches, open_model
from engine.persistence.cache_file import load_caches, save_caches
from engine.rope import make_rope
from engine.taps import watching
from parity.home import assay_home
from parity.models.fetch import ensure_snapshot

Same = Callable[[Any, Any], None]
Make = Callable[..., tuple[Any, Any]]
COVERED = (
    "llama-tiny",
    "llama-mixed-tiny",
    "llama_sliding-tiny",
    "llama_yarn-tiny",
    "llama_linear-q8g64-tiny",
    "llama_default-mxfp4-tiny",
    "mistral-q4g32-tiny",
    "qwen2-tiny",
    "qwen3-q4g64-tiny",
    "smollm3-tiny",
    "gemma-tiny",
    "gemma2-tiny",
    "granite-tiny",
    "minicpm-q4g64-tiny",
    "mistral3_mistral-tiny",
    "glm4-q4g32-tiny",
    "phi3-tiny",
    "starcoder2-tiny",
    "starcoder2-q8g64-tiny",
    "cohere2-tiny",
    "olmo2-tiny",
    "qwen3_moe-q4g64-tiny",
    "qwen3_moe-tiny",
    "mixtral-q4g32-tiny",
    "olmo3-q4g64-tiny",
    "gemma3_text-tiny",
    "gemma3_text-q4g64-tiny",
)
NOT_FUSED = {("llama_default-mxfp4-tiny", "f32"), ("qwen3_moe-tiny", "bf16")}  # see the test of what has no fused step
WHOLE, PIECES = Feed(whole=True), Feed(piece=7)


@pytest.fixture(scope="module")
def make(driver: Callable[[Form], Driver], step: StepCode) -> Make:
    """A model on plain operations and the same on the fused step: `make(snapshot, dtype, threads=)`."""

    def models(name: str, dtype: str = "f32", *, threads: int = 2) -> tuple[Any, Any]:
        said: list[str] = []
        kernels = Kernels(
            folder=assay_home() / "kernels",
            say=said.append,
            threads=threads,
            compile=lambda form, _: driver(form),
            compile_step=lambda _: step,
        )
        plain = open_model(ensure_snapshot(name).path, dtype=dtype)  # type: ignore[arg-type]
        fused = kernels.put_into(plain, name=None)
        assert (kernels.used, said) == ("fused", [])
        assert isinstance(fused, FusedModel)
        assert isinstance(fused, FastCaches)
        return plain, fused

    return models


def ids_of(model: CausalModel, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, model.vocabulary, count)]


def compare(plain: Any, fused: Any, ids: list[int], same: Same, *, num_steps: int, feed: Feed) -> None:
    pick = forced([(5 * i + 3) % plain.vocabulary for i in range(num_steps)])
    for expected, actual in zip(
        steps(plain, ids, num_steps=num_steps, feed=feed, pick=pick),
        steps(fused, ids, num_steps=num_steps, feed=feed, pick=pick),
        strict=True,
    ):
        same(expected.logits_BV, actual.logits_BV)
        assert [cache.kind for cache in actual.caches] == [cache.kind for cache in expected.caches]
        assert all(isinstance(cache, FusedCache) for cache in actual.caches)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in COVERED for dtype in ("f32", "bf16") if (name, dtype) not in NOT_FUSED],
)
def test_a_family_gives_the_bits_of_plain_operations(name: str, dtype: str, make: Make, same_bits: Same) -> None:
    plain, fused = make(name, dtype)
    for feed in (WHOLE, PIECES):
        compare(plain, fused, ids_of(plain, 61), same_bits, num_steps=12, feed=feed)


def test_float16_too(make: Make, same_bits: Same) -> None:
    plain, fused = make("qwen3-tiny", "f16")
    compare(plain, fused, ids_of(plain, 30), same_bits, num_steps=4, feed=PIECES)


@pytest.mark.parametrize("name", ["llama-tiny", "gemma3_text-tiny"])
def test_from_one_slab_to_the_next(name: str, make: Make, same_bits: Same) -> None:
    plain, fused = make(name)
    compare(plain, fused, ids_of(plain, 250), same_bits, num_steps=12, feed=WHOLE)
    compare(plain, fused, ids_of(plain, 521), same_bits, num_steps=2, feed=Feed(piece=257))


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3_moe-tiny", "cohere2-tiny"])
def test_one_thread_gives_what_several_give(name: str, make: Make, same_bits: Same) -> None:
    _, one = make(name, threads=1)
    _, many = make(name, threads=4)
    many.program = replace(many.program, cost=10**12)  # worth every thread
    compare(one, many, ids_of(one, 70), same_bits, num_steps=8, feed=WHOLE)


def hidden(model: Any, ids: list[int], caches: Any) -> tuple[mx.array, Any]:
    out, caches = model.hidden(mx.array([ids]), caches)
    return out, caches


def fresh(fused: Any) -> Any:
    return fused.fast_caches(fused.make_caches())


@pytest.mark.parametrize("name", ["llama-tiny", "llama_sliding-tiny"])
def test_forks_stay_right_whoever_goes_on_first(name: str, make: Make, same_bits: Same) -> None:
    plain, fused = make(name)
    _, root = hidden(plain, [1, 2, 3], plain.make_caches())
    _, fork = hidden(fused, [1, 2, 3], fresh(fused))
    branches = ([4], [5, 6], [4], [7] * 9)
    expected = [hidden(plain, ids, root) for ids in branches]
    actual = [hidden(fused, ids, fork) for ids in branches]
    for _ in range(2):
        for (right, _), (found, _) in zip(expected, actual, strict=True):
            same_bits(right, found)
        expected = [hidden(plain, [8], caches) for _, caches in expected]
        actual = [hidden(fused, [8], caches) for _, caches in actual]


def test_trimmed_caches_go_on_in_the_fused_step(make: Make, same_bits: Same) -> None:
    plain, fused = make("llama-tiny")
    _, right = hidden(plain, [1, 2, 3, 4, 5], plain.make_caches())
    _, caches = hidden(fused, [1, 2, 3, 4, 5], fresh(fused))
    right, caches = [c.trim(2) for c in right], [c.trim(2) for c in caches]
    expected, _ = hidden(plain, [9], right)
    actual, longer = hidden(fused, [9], caches)
    same_bits(expected, actual)
    assert isinstance(longer[0], FusedCache)


@pytest.mark.parametrize("kv", [KVMode(bits=8, group_size=32), KVMode(bits=4, group_size=32, start=20)])
def test_a_kv_mode_packs_what_the_fused_step_left(kv: KVMode, make: Make, same_bits: Same) -> None:
    plain, fused = make("llama-tiny")
    rows: list[list[Any]] = []
    for model in (plain, fused):
        *_, last = steps(model, ids_of(plain, 17), num_steps=3, feed=WHOLE)
        rows.append(list(steps(model, [last.token_id], num_steps=4, kv=kv, caches=last.caches)))
        assert rows[-1][-1].caches[0].kind == f"quantized-b{kv.bits}-g32"
    for expected, actual in zip(*rows, strict=True):
        same_bits(expected.logits_BV, actual.logits_BV)


def test_a_family_goes_on_from_fused_caches_and_settles_them(make: Make, same_bits: Same) -> None:
    for name in ("llama-tiny", "llama_sliding-tiny"):
        plain, fused = make(name)
        _, right = hidden(plain, [1, 2, 3], plain.make_caches())
        _, caches = hidden(fused, [1, 2, 3], fresh(fused))
        expected, _ = hidden(plain, [4], right)
        same_bits(expected, hidden(plain, [4], caches)[0])
        same_bits(expected, hidden(plain, [4], settled(caches))[0])
        assert [type(cache) for cache in settled(caches)] == [type(cache) for cache in right]
        assert settled(right) == tuple(right)


def test_whoever_watches_sees_every_module(make: Make, same_bits: Same) -> None:
    plain, fused = make("llama-tiny")
    seen: list[dict[str, mx.array]] = []
    for model, empty in ((plain, plain.make_caches()), (fused, fresh(fused))):
        _, caches = hidden(model, [1, 2, 3], empty)
        seen.append({})
        with watching(seen[-1].__setitem__):
            _, caches = hidden(model, [4], caches)
        assert isinstance(caches[0], PlainCache)
        seen[-1]["after"], _ = hidden(model, [5], caches)
    assert seen[0].keys() == seen[1].keys()
    assert len(seen[0]) > 20
    for path, expected in seen[0].items():
        same_bits(expected, seen[1][path])


def test_batches_and_caches_of_others_are_left_to_fast_products(make: Make, same_bits: Same) -> None:
    plain, fused = make("llama-tiny")
    batch = mx.array([[1, 2, 3], [4, 5, 6]])
    right, _ = plain.hidden(batch, plain.make_caches())
    found, caches = fused.hidden(batch, fresh(fused))
    same_bits(right, found)
    assert isinstance(caches[0], PlainCache)
    _, held = hidden(plain, [1, 2], plain.make_caches())
    same_bits(hidden(plain, [3], held)[0], hidden(fused, [3], held)[0])
    assert fused.fast_caches(held) == tuple(held)
    _, other = hidden(make("llama-tiny")[1], [1, 2], fresh(fused))
    assert isinstance(other[0], FusedCache | PlainCache)
    same_bits(hidden(plain, [3], held)[0], hidden(fused, [3], other)[0])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_left_to_mlx(value: float, llama: Any, make_kernels: Any, same_bits: Same) -> None:
    plain = llama()
    weight = np.array(plain.embedding.weight)
    weight[7, 3] = value
    plain = replace(plain, embedding=replace(plain.embedding, weight=mx.array(weight)))
    fused = make_kernels().put_into(plain, name=None)
    assert isinstance(fused, FusedModel)
    for ids in ([1, 2, 3], [1, 7, 3], [4, 5]):
        expected = list(steps(plain, ids, num_steps=2, pick=forced((4, 7))))
        actual = list(steps(fused, ids, num_steps=2, pick=forced((4, 7))))
        for right, found in zip(expected, actual, strict=True):
            same_bits(right.logits_BV, found.logits_BV)


def test_scores_of_experts_that_are_not_finite_are_left_to_mlx(make_kernels: Any, same_bits: Same) -> None:
    plain: Any = open_model(ensure_snapshot("qwen3_moe-tiny").path, dtype="f32")
    at = next(i for i, block in enumerate(plain.blocks) if hasattr(block.mlp, "router"))
    block = plain.blocks[at]
    weight = np.array(block.mlp.router.weight)
    weight[0], weight[1] = 3e38, -3e38  # whatever a row of inputs is, a sum of some of them is infinite
    new = replace(block, mlp=replace(block.mlp, router=replace(block.mlp.router, weight=mx.array(weight))))
    plain = replace(plain, blocks=(*plain.blocks[:at], new, *plain.blocks[at + 1 :]))
    fused = make_kernels().put_into(plain, name=None)
    assert isinstance(fused, FusedModel)
    expected, _ = hidden(plain, [1, 7, 3], plain.make_caches())
    actual, caches = hidden(fused, [1, 7, 3], fresh(fused))
    same_bits(expected, actual)
    assert not isinstance(caches[0], FusedCache)


def test_parts_that_a_step_lacks_are_reasons(make: Make) -> None:
    _, fused = make("llama-tiny")
    model, block = fused.linear, fused.linear.blocks[0]

    def odd(**changes: Any) -> Any:
        return replace(model, blocks=(replace(block, **changes), *model.blocks[1:]))

    attention, mlp = block.attention, block.mlp
    with pytest.raises(NotFusedError, match="an MLP of the kind str"):
        plan_of(odd(mlp="mlp"))
    with pytest.raises(NotFusedError, match="the activation <lambda>"):
        plan_of(odd(mlp=replace(mlp, activation=lambda gate, up: gate * up)))
    with pytest.raises(NotFusedError, match="attention of the kind str"):
        plan_of(odd(attention="attention"))
    with pytest.raises(NotFusedError, match=r"q_proj has no compiled product"):
        plan_of(odd(attention=replace(attention, q=replace(attention.q, weight=mx.zeros((8, 8))))))
    with pytest.raises(NotFusedError, match=r"input_layernorm has no weight of the model's dtype"):
        plan_of(odd(input_norm=replace(block.input_norm, weight=None)))


def test_experts_that_a_step_has_no_part_for_are_reasons(make: Make) -> None:
    model = make("qwen3_moe-q4g64-tiny")[1].linear
    at, mlp = next((i, block.mlp) for i, block in enumerate(model.blocks) if isinstance(block.mlp, ExpertMLP))

    def odd(**changes: Any) -> Any:
        changed = replace(mlp, experts=replace(mlp.experts, **changes))
        blocks = [replace(b, mlp=changed) if i == at else b for i, b in enumerate(model.blocks)]
        return replace(model, blocks=tuple(blocks))

    plan_of(odd())
    with pytest.raises(NotFusedError, match="switch_mlp has biases"):
        plan_of(odd(up=replace(mlp.experts.up, bias=mx.zeros((8, 8)))))
    with pytest.raises(NotFusedError, match="switch_mlp has no compiled product"):
        plan_of(odd(up=replace(mlp.experts.up, weight=mx.zeros((8, 8, 8)))))
    with pytest.raises(NotFusedError, match="experts of the kind str"):
        plan_of(replace(model, blocks=(replace(model.blocks[at], mlp=replace(mlp, experts="experts")),)))


def test_a_compiled_product_is_that_of_one_form_only(
    make: Make, step: StepCode, driver: Callable[[Form], Driver]
) -> None:
    _, fused = make("llama-mixed-tiny")
    with pytest.raises(NotFusedError, match=r"one compiled product for packed-\d-f32 and for packed-\d-f32"):
        build_program(fused.plan, step, lambda _: driver(Form(stored="f32", bits=4)), columns=16)


def test_rotations_share_a_table_where_they_turn_by_the_same_angles_and_only_there() -> None:
    scaling = {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16}
    bent, again = (make_rope(8, base=100.0, scaling=scaling) for _ in range(2))
    assert alike(bent, again)
    assert alike(bent, replace(bent, gain=1.0, traditional=True))  # which are not in the table
    assert alike(make_rope(8, base=100.0), make_rope(8, base=100.0))
    periods = np.array(bent.periods)
    periods[1] = np.nextafter(periods[1], np.float32(0))
    for other in (replace(bent, periods=mx.array(periods)), make_rope(8, base=100.0), make_rope(8, base=101.0)):
        assert not alike(bent, other)
    assert not alike(make_rope(8, base=100.0), make_rope(8, base=101.0))
    assert not alike(make_rope(8, base=100.0), make_rope(6, base=100.0))


def test_every_family_of_the_table_is_tested() -> None:
    names = {name.partition("-")[0] for name in COVERED}
    tested = {name if name in FAMILIES else name.partition("_")[0] for name in names}
    assert set(FAMILIES) == tested - {"mistral"}


def test_keys_and_values_are_stored_by_the_columns_of_a_product(make: Make) -> None:
    _, fused = make("llama-tiny")
    assert fused.program.geometry.columns == shape_of(Form(stored="f32")).columns


@pytest.mark.parametrize("name", ["llama-tiny", "gemma3_text-tiny"])
def test_caches_of_the_fused_step_are_stored_as_those_they_stand_for(
    name: str, make: Make, same_bits: Same, tmp_path: Path
) -> None:
    plain, fused = make(name)
    ids, pick = ids_of(plain, 40), forced([7, 8, 9, 10])
    *_, last = steps(fused, ids, num_steps=2, pick=pick)
    fed = [*ids, 7]
    save_caches(tmp_path / "caches", last.caches, tokens=fed)
    read = load_caches(tmp_path / "caches").caches

    assert not any(isinstance(cache, FusedCache) for cache in read)
    (expected,) = steps(plain, [8], num_steps=1, caches=settled(last.caches))
    (actual,) = steps(plain, [8], num_steps=1, caches=read)
    same_bits(expected.logits_BV, actual.logits_BV)
