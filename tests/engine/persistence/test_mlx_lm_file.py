"""Prompt caches go over to mlx-lm and back: its file is read, goes on as it does there, and is written again bit for bit."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache, KVCache, PackedHeads
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError
from engine.persistence.mlx_lm_file import load_mlx_lm, save_mlx_lm
from engine.persistence.refusal import CacheFileError
from engine.persistence.tensor_bytes import decode, encode
from tests.engine.tiny_runs import RUNS, random_ids, rows_of

Check = Callable[..., None]
FIXTURE = Path(__file__).parents[2] / "fixtures" / "mlx_lm" / "prompt_cache.safetensors"
CONTINUED = FIXTURE.with_name("prompt_cache_continued.safetensors")
OURS_ALONE = ("mixed-widths", "paged", "rotating-quantized", "turboquant", "turboquant-deferred", "turboquant-vlm")
KINDS = [
    "plain",
    "rotating-w6-k0",
    "rotating-w8-k2",
    "quantized-b4-g32",
    "arrays-3",
    "list[arrays-1,plain]",
    "list[plain,plain]",
    "chunked-c8",
    "quantized-b8-g32",
]


def test_the_file_that_mlx_lm_wrote_is_read() -> None:
    caches, metadata = load_mlx_lm(FIXTURE)
    assert [cache.kind for cache in caches] == KINDS
    assert [cache.offset for cache in caches] == [11] * 8 + [0]
    assert metadata == {"model": "none", "tokens": "11"}


def test_one_more_append_gives_what_it_gives_in_mlx_lm(same_bits: Check) -> None:
    recorded, _ = decode(CONTINUED.read_bytes())
    compared = set()
    for place, cache in enumerate(load_mlx_lm(FIXTURE)[0]):
        members: tuple[Cache, ...] = cache.members if isinstance(cache, CacheGroup) else (cache,)
        for number, member in enumerate(members):
            name = f"{place}.{number}"
            if f"{name}.new" not in recorded:
                continue
            assert isinstance(member, KVCache)
            _, *fetched = member.append(recorded[f"{name}.new"], recorded[f"{name}.new"] * 3)
            for word, heads in zip(("keys", "values"), fetched, strict=True):
                packed = isinstance(heads, PackedHeads)
                parts = (heads.weight, heads.scales, heads.biases) if packed else (heads,)
                for part, array in enumerate(parts):
                    same_bits(recorded[f"{name}.{word}.{part}"], array)
                    compared.add(f"{name}.{word}.{part}")
    assert compared == {name for name in recorded if not name.endswith(".new")}


def test_writing_it_again_gives_every_tensor_and_every_word_that_mlx_lm_wrote(same_bits: Check, tmp_path: Path) -> None:
    caches, metadata = load_mlx_lm(FIXTURE)
    save_mlx_lm(tmp_path / "again.safetensors", caches, metadata=metadata)
    expected, actual = (decode(file.read_bytes()) for file in (FIXTURE, tmp_path / "again.safetensors"))
    assert actual[1] == expected[1]
    assert actual[0].keys() == expected[0].keys()
    for name, array in expected[0].items():
        same_bits(array, actual[0][name])


@pytest.mark.parametrize("kind", [kind for kind in RUNS if kind not in OURS_ALONE])
def test_save_reload_continue_is_the_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    run, ids, file = RUNS[kind], random_ids(2, 40), tmp_path / "prompt.safetensors"
    whole = run.run(ids, rows=12)
    save_mlx_lm(file, whole[3].caches)
    caches, metadata = load_mlx_lm(file)
    assert metadata == {}
    assert rows_of(run.run(ids[32:], rows=8, caches=caches)) == rows_of(whole)[4:]


def test_a_recurrent_model_needs_its_tokens_counted_by_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    save_mlx_lm(file, [RecurrentCache(state=(mx.ones((1, 2)), None), offset=7)])
    with pytest.raises(CacheFileError) as caught:
        load_mlx_lm(file)
    assert str(caught.value) == (
        "the prompt cache does not say how many tokens it has seen\n"
        "  file    state.safetensors\n"
        "  caches  recurrent only\n"
        "  next    pass num_tokens"
    )
    assert load_mlx_lm(file, num_tokens=7)[0][0].offset == 7


def test_a_class_without_a_kind_here_is_refused_by_name(tmp_path: Path) -> None:
    arrays, metadata = decode(FIXTURE.read_bytes())
    file = tmp_path / "p.safetensors"
    file.write_bytes(b"".join(encode(arrays, metadata | {"1.0": "ConcatenateKVCache"})))
    with pytest.raises(CacheFileError) as caught:
        load_mlx_lm(file)
    assert str(caught.value) == (
        "the prompt cache holds a class that has no kind here\n"
        "  file   p.safetensors\n"
        "  found  ConcatenateKVCache\n"
        "  known  KVCache, RotatingKVCache, QuantizedKVCache, ChunkedKVCache, ArraysCache, CacheList\n"
        "  next   save it with caches of these classes"
    )


@pytest.mark.parametrize("kind", OURS_ALONE)
def test_what_mlx_lm_would_continue_otherwise_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="mlx-lm has no class for this cache"):
        save_mlx_lm(tmp_path / "x", RUNS[kind].run(random_ids(2, 20), rows=1)[-1].caches)


def test_a_kind_without_a_class_there_is_refused(tmp_path: Path) -> None:
    class Spiral:
        kind = "spiral"

    with pytest.raises(RequestError) as caught:
        save_mlx_lm(tmp_path / "x", [Spiral()])  # type: ignore[list-item]
    assert str(caught.value) == (
        "mlx-lm has no class for this cache\n  kind  spiral\n  next  use engine.persistence.cache_file"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda arrays, _: arrays.pop("0.1"), "a state with the places [0, 2]"),
        (lambda arrays, _: arrays.pop("6.1.0.2"), "a state of 2 parts for a KVCache"),
        (lambda _, metadata: metadata.pop("1.3"), "its metadata lists no classes of caches"),
        (lambda _, metadata: metadata.update({"1.9": "KVCache"}), "states of caches [0, 1, 2, 3, 4, 5, 6, 7, 8]"),
        (lambda _, metadata: metadata.update({"2.1.1": "scroll"}), "a leaf of unknown type 'scroll'"),
        (lambda arrays, _: arrays.update({"0.2": mx.array(257)}), "for 257 positions"),
        (lambda arrays, _: arrays.update({"1.5": mx.array(9)}), "for 9 positions"),
        (lambda arrays, _: arrays.update({"3.4": mx.array(8)}), "of 8 bits in groups of 32"),
    ],
)
def test_states_that_do_not_fit_together_are_refused(
    tmp_path: Path, change: Callable[[dict[str, mx.array], dict[str, str]], object], reason: str
) -> None:
    arrays, metadata = decode(FIXTURE.read_bytes())
    change(arrays, metadata)
    file = tmp_path / "p.safetensors"
    file.write_bytes(b"".join(encode(arrays, metadata)))
    with pytest.raises(CacheFileError) as caught:
        load_mlx_lm(file)
    assert "not a prompt cache of mlx-lm: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    whole = FIXTURE.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CacheFileError, match="not a valid safetensors file"):
            load_mlx_lm(file)


def test_a_ring_of_ours_is_a_ring_of_theirs(tmp_path: Path, same_bits: Check) -> None:
    ring = RotatingCache(max_size=6)
    for L in (4, 1, 1, 1, 3, 1):
        ring, *_ = ring.append(mx.random.normal((1, 1, L, 2)), mx.random.normal((1, 1, L, 2)))
    save_mlx_lm(tmp_path / "r.safetensors", [ring, PlainCache()])
    (loaded, empty), _ = load_mlx_lm(tmp_path / "r.safetensors")
    assert isinstance(loaded, RotatingCache)
    assert isinstance(empty, PlainCache)
    assert (loaded.offset, loaded.index, loaded.max_size, loaded.keep) == (11, ring.index, 6, 0)
    assert empty.keys is None
    for expected, actual in zip(ring.arrays, loaded.arrays, strict=True):
        same_bits(expected, actual)
