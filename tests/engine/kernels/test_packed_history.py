"""Packed keys and values on the fused step: mlx's words, whenever they are packed, and the bits of attention over them."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.convert import KVMode
from engine.cache.per_layer import LayerWidth
from engine.cache.protocol import PackedHeads, Tiling, settled
from engine.cache.quantized import EmptyQuantizedCache, QuantizedCache, pack
from engine.generate import Feed, forced, steps
from engine.kernels import fields as f
from engine.kernels.driver import Driver, Form
from engine.kernels.fused import FusedModel
from engine.kernels.history import FusedCache, Geometry, History
from engine.kernels.level import Kernels
from engine.kernels.memory import entry
from engine.kernels.packer import packed_copy, packed_geometry
from engine.kernels.step import StepCode
from engine.kernels.team import Team
from engine.kernels.verify import DTYPES, SPECIALS, KernelError, sprinkled
from engine.kernels.verify_step import PACKED, HeadProbe, check_part
from engine.model import open_model
from engine.persistence.cache_file import load_caches, save_caches
from engine.prompt_cache import PromptCache
from parity.home import assay_home
from parity.models.fetch import ensure_snapshot

Same = Callable[[Any, Any], None]
Make = Callable[..., tuple[Any, Any]]
WHOLE, PIECES = Feed(whole=True), Feed(piece=7)
KV8 = KVMode(bits=8, group_size=32)


@pytest.fixture(scope="module")
def make(driver: Callable[[Form], Driver], step: StepCode) -> Make:
    """A model on plain operations and the same on the fused step; each is made once."""
    made: dict[tuple[str, str], tuple[Any, Any]] = {}

    def models(name: str = "llama-tiny", dtype: str = "f32") -> tuple[Any, Any]:
        if (name, dtype) not in made:
            plain = open_model(ensure_snapshot(name).path, dtype=dtype)  # type: ignore[arg-type]
            made[name, dtype] = plain, kernels(driver, step).put_into(plain, name=None)
            assert isinstance(made[name, dtype][1], FusedModel)
        return made[name, dtype]

    return models


def kernels(driver: Callable[[Form], Driver], step: StepCode, *, folder: Path | None = None) -> Kernels:
    return Kernels(
        folder=folder or assay_home() / "kernels",
        say=[].append,
        threads=2,
        compile=lambda form, _: driver(form),
        compile_step=lambda _: step,
    )


def ids_of(model: Any, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, model.vocabulary, count)]


def compare(models: tuple[Any, Any], same: Same, *, prompt: int = 40, num_steps: int = 5, **asked: Any) -> list[Any]:
    """Steps of both; returns the last caches of each."""
    plain, fused = models
    ids, pick = ids_of(plain, prompt), forced([(5 * i + 3) % plain.vocabulary for i in range(num_steps)])
    runs = [list(steps(model, ids, num_steps=num_steps, pick=pick, **asked)) for model in (plain, fused)]
    for expected, actual in zip(*runs, strict=True):
        same(expected.logits_BV, actual.logits_BV)
        assert [cache.kind for cache in actual.caches] == [cache.kind for cache in expected.caches]
    return [run[-1].caches for run in runs]


def same_caches(expected: Any, actual: Any, same: Same) -> None:
    """The words of all positions in use."""
    for right, found in zip(expected, settled(actual), strict=True):
        assert type(right) is type(found)
        assert right.offset == found.offset
        for a, b in zip(right.arrays, found.arrays, strict=True):
            same(a[:, :, : right.offset], b[:, :, : right.offset])


@pytest.mark.parametrize("feed", [WHOLE, PIECES], ids=["whole", "pieces"])
@pytest.mark.parametrize(
    ("name", "kv"),
    [
        *(
            ("llama-tiny", KVMode(bits=bits, group_size=group_size, order=order))  # type: ignore[arg-type]
            for bits, group_size in ((8, 32), (4, 64), (3, 32), (2, 32), (5, 64), (6, 32))
            for order in ("after-forward", "after-prompt", "from-empty")
        ),
        ("llama-tiny", KVMode(bits=4, group_size=32, start=20)),
        ("llama-tiny", KVMode(bits=4, group_size=32, start=43)),
        ("qwen3-tiny", KV8),
        ("qwen3-tiny", KVMode(bits=3, group_size=32, order="from-empty")),
        ("smollm3-tiny", KVMode(bits=4, group_size=32, order="after-prompt")),
        ("smollm3-tiny", KV8),
        ("llama-mixed-tiny", KV8),
    ],
)
def test_a_packed_run_stays_fused_and_gives_the_bits_of_plain_operations(
    name: str, kv: KVMode, feed: Feed, make: Make, same_bits: Same
) -> None:
    expected, actual = compare(make(name), same_bits, kv=kv, feed=feed)
    assert all(isinstance(cache, FusedCache) for cache in actual)
    assert {cache.kind for cache in actual} == {f"quantized-b{kv.bits}-g{kv.group_size}"}
    same_caches(expected, actual, same_bits)


@pytest.mark.parametrize(
    ("name", "dtype", "kv"),
    [
        ("llama-tiny", "bf16", KV8),
        ("llama-tiny", "f16", KVMode(bits=4, group_size=64, order="from-empty")),
        ("qwen3-tiny", "bf16", KVMode(bits=3, group_size=32, order="from-empty")),
        ("qwen3-tiny", "f16", replace(KV8, start=20)),
        ("smollm3-tiny", "bf16", KVMode(bits=6, group_size=32, order="after-prompt")),
    ],
)
def test_in_16_bits_too(name: str, dtype: str, kv: KVMode, make: Make, same_bits: Same) -> None:
    for feed in (WHOLE, PIECES):
        expected, actual = compare(make(name, dtype), same_bits, kv=kv, feed=feed)
        assert all(isinstance(cache, FusedCache) for cache in actual)
        same_caches(expected, actual, same_bits)


@pytest.mark.parametrize("kv", [KV8, KVMode(bits=4, group_size=64, order="from-empty"), replace(KV8, start=255)])
def test_from_one_slab_to_the_next(kv: KVMode, make: Make, same_bits: Same) -> None:
    expected, actual = compare(make(), same_bits, prompt=251, num_steps=9, kv=kv, feed=WHOLE)
    same_caches(expected, actual, same_bits)
    expected, actual = compare(make(), same_bits, prompt=521, num_steps=2, kv=kv, feed=Feed(piece=257))
    same_caches(expected, actual, same_bits)


def hidden(model: Any, ids: list[int], caches: Any) -> tuple[mx.array, Any]:
    out: mx.array
    out, caches = model.hidden(mx.array([ids]), caches)
    return out, caches


def packed_root(models: tuple[Any, Any], kv: KVMode = KV8) -> list[Any]:
    """Packed caches of both, after a few tokens."""
    (*_, a), (*_, b) = (steps(model, [1, 2, 3, 4, 5], num_steps=2, kv=kv, pick=forced([6, 7])) for model in models)
    assert isinstance(b.caches[0], FusedCache)
    return [a.caches, b.caches]


def test_forks_stay_right_whoever_goes_on_first(make: Make, same_bits: Same) -> None:
    plain, fused = make()
    right, found = packed_root(make())
    branches = ([4], [5, 6], [4], [7] * 9)
    expected, actual = ([hidden(m, ids, root) for ids in branches] for m, root in ((plain, right), (fused, found)))
    for _ in range(2):
        for (a, right_caches), (b, caches) in zip(expected, actual, strict=True):
            same_bits(a, b)
            same_caches(right_caches, caches, same_bits)
        expected = [hidden(plain, [8], caches) for _, caches in expected]
        actual = [hidden(fused, [8], caches) for _, caches in actual]


def test_a_history_that_was_packed_once_can_be_packed_otherwise_and_go_on_unpacked(make: Make, same_bits: Same) -> None:
    plain, fused = make()
    _, right = hidden(plain, [1, 2, 3], plain.make_caches())
    _, root = hidden(fused, [1, 2, 3], fused.fast_caches(fused.make_caches()))
    for kv in (KV8, KVMode(bits=3, group_size=64), None):
        a, b = (
            list(steps(m, [9, 4], num_steps=2, kv=kv, caches=c, pick=forced([5, 6])))
            for m, c in ((plain, right), (fused, root))
        )
        for expected, actual in zip(a, b, strict=True):
            same_bits(expected.logits_BV, actual.logits_BV)
        assert isinstance(b[-1].caches[0], FusedCache)


@pytest.mark.parametrize("by", [0, 2, 6])
def test_trimmed_caches_go_on_in_the_fused_step(by: int, make: Make, same_bits: Same) -> None:
    plain, fused = make()
    right, found = ([cache.trim(by) for cache in caches] for caches in packed_root(make()))
    assert [cache.kind for cache in right] == [cache.kind for cache in found]
    (expected, _), (actual, longer) = hidden(plain, [9], right), hidden(fused, [9], found)
    same_bits(expected, actual)
    assert isinstance(longer[0], FusedCache)


def test_stored_caches_are_those_they_stand_for(make: Make, same_bits: Same, tmp_path: Path) -> None:
    plain, _ = make()
    right, found = packed_root(make(), KVMode(bits=5, group_size=32))
    save_caches(tmp_path / "caches", found, tokens=[1, 2, 3, 4, 5, 6])
    read = load_caches(tmp_path / "caches").caches
    assert all(isinstance(cache, QuantizedCache) for cache in read)
    same_caches(right, read, same_bits)
    same_bits(hidden(plain, [8], right)[0], hidden(plain, [8], read)[0])


@pytest.mark.parametrize("kv", [None, KV8])
def test_a_prompt_cache_counts_the_bytes_of_the_fused_step(kv: KVMode | None, make: Make) -> None:
    _, fused = make()
    (step,) = steps(fused, [1, 2, 3], num_steps=1, kv=kv)
    assert isinstance(step.caches[0], FusedCache)
    (slab,) = step.caches[0].history.slabs
    cache = PromptCache(max_bytes=slab.memory.nbytes)
    assert cache.put([1, 2, 3], step.caches)
    assert cache.num_bytes == slab.memory.nbytes
    assert not PromptCache(max_bytes=slab.memory.nbytes - 1).put([1, 2, 3], step.caches)


def test_a_family_goes_on_from_packed_fused_caches(make: Make, same_bits: Same) -> None:
    plain, fused = make()
    right, found = packed_root(make())
    same_bits(hidden(plain, [4, 5], right)[0], hidden(plain, [4, 5], found)[0])
    (empty, *_) = fused.fast_caches([EmptyQuantizedCache(bits=8, group_size=32) for _ in right])
    assert isinstance(empty, FusedCache)
    assert isinstance(empty.plain(), EmptyQuantizedCache)


@pytest.mark.parametrize(
    ("name", "dtype", "kv"),
    [
        ("llama-tiny", "f32", KVMode(layers=(LayerWidth(cache=0, bits=8, group_size=32),))),
        ("llama-tiny", "f32", KVMode(bits=8, group_size=32, tiling=Tiling(size=8, lifted=True))),
        ("llama-tiny", "f32", KVMode(max_size=16)),
        ("llama_sliding-tiny", "f32", KV8),
    ],
)
def test_what_the_step_does_not_pack_is_left_to_fast_products(
    name: str, dtype: str, kv: KVMode, make: Make, same_bits: Same
) -> None:
    expected, actual = compare(make(name, dtype), same_bits, num_steps=4, kv=kv, feed=PIECES)
    assert not any(isinstance(cache, FusedCache) for cache in actual)
    same_caches(expected, actual, same_bits)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("order", ["after-forward", "from-empty"])
def test_what_is_not_finite_is_left_to_mlx(  # noqa: PLR0917 - pytest names its arguments
    value: float, order: Any, llama: Any, driver: Any, step: StepCode, same_bits: Same, tmp_path: Path
) -> None:
    plain = llama()
    weight = np.array(plain.embedding.weight)
    weight[7, 3] = value
    plain = replace(plain, embedding=replace(plain.embedding, weight=mx.array(weight)))
    fused = kernels(driver, step, folder=tmp_path).put_into(plain, name=None)
    assert isinstance(fused, FusedModel)
    group_size = next((size for size in (32, 64, 128) if plain.head_width % size == 0), None)
    assert group_size is not None
    kv = KVMode(bits=8, group_size=group_size, order=order)
    for ids in ([1, 2, 3], [1, 7, 3], [7, 5]):
        runs = [list(steps(m, ids, num_steps=3, pick=forced((4, 7, 1)), kv=kv)) for m in (plain, fused)]
        for right, found in zip(*runs, strict=True):
            same_bits(right.logits_BV, found.logits_BV)


def history_of(heads: Any, *, columns: int, dtype: mx.Dtype) -> History:
    """A plain history of one layer that holds keys and values [2, groups, positions, width]."""
    _, groups, positions, width = heads.shape
    geometry = Geometry(layers=1, groups=groups, width=width, columns=columns, dtype=dtype)
    history = History(geometry=geometry).extended(positions)
    for position in range(positions):
        memory, place = history.slabs[position // f.SLAB].memory, position % f.SLAB
        keys = memory[: geometry.key_floats].reshape(groups, -1, width, columns)
        values = memory[geometry.key_floats :].reshape(groups, geometry.blocks, f.SLAB, columns)
        keys[:, place // columns, :, place % columns] = heads[0, :, position]
        for block in range(geometry.blocks):
            part = heads[1, :, position, block * columns : (block + 1) * columns]
            values[:, block, place, : part.shape[1]] = part
    return history


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("width", "group_size", "columns"), [(32, 32, 64), (192, 64, 16), (128, 128, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_history_is_packed_to_the_words_of_mlx(  # noqa: PLR0917 - pytest names its arguments
    bits: int, width: int, group_size: int, columns: int, dtype: str, step: StepCode, same_bits: Same
) -> None:
    random = np.random.default_rng([bits, width])
    heads = sprinkled(random, (2, 1, 300, width), "tiny")
    flat = heads.reshape(-1, group_size)
    flat[0], flat[1], flat[2], flat[3, 1:] = 0.0, 5.0, -2.5, 0.0  # no range at all; zeros; one element alone
    flat[4] = np.float32(5.0) + np.arange(group_size, dtype=np.float32) * np.float32(
        4.8e-7
    )  # a range below the least scale
    flat[5] = np.where(np.arange(group_size) % 2, 1.5, -1.5)  # both ends as far from zero
    flat[6], flat[7] = np.abs(flat[6]) * np.float32(-1e-30), np.float32(1e-42)
    given = mx.array(heads).astype(DTYPES[dtype])
    history = history_of(np.array(given.astype(mx.float32)), columns=columns, dtype=DTYPES[dtype])
    geometry = packed_geometry(history.geometry, bits=bits, group_size=group_size)
    packed = packed_copy(history, geometry, step, Team(threads=2))
    assert packed is not None
    found = FusedCache(history=packed, layer=0).plain()
    assert isinstance(found, QuantizedCache)
    for expected, actual, kept in zip(given, (found.keys, found.values), packed.heads(0), strict=True):
        right = pack(expected[None], bits=bits, group_size=group_size)
        same_packed(right, actual, same_bits)
        options = {"group_size": group_size, "bits": bits}
        meant = mx.dequantize(right.weight, right.scales, right.biases, **options)[0]
        same_bits(meant, mx.array(np.ascontiguousarray(kept)).astype(DTYPES[dtype]))


def same_packed(expected: PackedHeads, actual: PackedHeads, same: Same) -> None:
    assert (expected.bits, expected.group_size) == (actual.bits, actual.group_size)
    for name in ("weight", "scales", "biases"):
        same(getattr(expected, name), getattr(actual, name))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4e38])
@pytest.mark.parametrize("which", [0, 1])
def test_a_history_with_a_value_that_is_not_finite_is_not_packed(value: float, which: int, step: StepCode) -> None:
    heads = np.ones((2, 1, 3, 32), np.float32)
    heads[which, 0, 1, 5], heads[which, 0, 1, 6] = value, -3.4e38
    history = history_of(heads, columns=16, dtype=mx.float32)
    geometry = packed_geometry(history.geometry, bits=8, group_size=32)
    assert packed_copy(history, geometry, step, Team(threads=1)) is None


def test_random_packed_attentions_with_special_values_are_bit_identical(step: StepCode) -> None:
    random = np.random.default_rng(13)
    for seed in range(40):
        group_size = int(random.choice([32, 64, 128]))
        probe = HeadProbe(
            dtype=list(DTYPES)[int(random.integers(3))],
            pieces=tuple(int(n) for n in random.choice([1, 1, 1, 2, 5, 17, 49, 66], int(random.integers(2, 6)))),
            groups=int(random.integers(1, 4)),
            group=int(random.integers(1, 6)),
            width=group_size * int(random.integers(1, 3)),
            special=list(SPECIALS)[seed % len(SPECIALS)],
            bias=bool(random.integers(2)),
            norm=bool(random.integers(2)),
            rope=[None, "halves", "neighbours", "part", "gain"][int(random.integers(5))],
            packed=(int(random.choice([2, 3, 4, 5, 6, 8])), group_size),
            seed=seed,
        )
        check_part(step, probe)


def changed(step: StepCode, field: int, *, flip: int = 1) -> StepCode:
    """A step that flips bits of the first word behind an address of its packing parts, in the first slab."""

    def run(parts: int, number: int, context: int, control: int) -> int:
        done: int = step.run(parts, number, context, control)
        for i in range(number):
            words = (ctypes.c_int64 * f.FIELDS).from_address(parts + 8 * f.FIELDS * i)
            if words[f.KIND] == f.OTHER and words[f.CODE] == entry(step.packing):
                slabs = ctypes.c_int64.from_address(context + 8 * f.SLABS).value
                slab = ctypes.c_int64.from_address(slabs).value
                ctypes.c_uint32.from_address(slab + words[field]).value ^= flip
                break  # every layer names the same word
        return done

    return replace(step, run=run)


@pytest.mark.parametrize(("field", "name"), [(f.CODES_AT, "codes"), (f.SCALES_AT, "scales")])
def test_the_proof_catches_one_bit_of_what_is_packed(field: int, name: str, step: StepCode) -> None:
    with pytest.raises(KernelError, match=f"the {name} of the fused step does not give mlx's bits here"):
        check_part(changed(step, field), PACKED[0])


def test_a_model_that_goes_wrong_on_packed_values_alone_stays_on_fast_products(
    driver: Any, step: StepCode, llama: Any, tmp_path: Path
) -> None:
    assert isinstance(
        kernels(driver, step, folder=tmp_path).put_into(llama(), name="one"), FusedModel
    )  # proves the step
    wrong = kernels(driver, changed(step, f.VALUES_AT, flip=0x400000), folder=tmp_path)
    assert not isinstance(wrong.put_into(llama(), name="two"), FusedModel)
    assert wrong.used == "linear (the model on the fused step does not give its own bits here)"
