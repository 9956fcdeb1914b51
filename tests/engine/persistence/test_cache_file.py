"""A saved cache goes on as if it had never left memory; a file that is not whole, or not of this model, is refused."""

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.cache.batch import merged
from engine.cache.convert import KVMode, converted
from engine.cache.plain import PlainCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.errors import RequestError
from engine.persistence import cache_file
from engine.persistence.cache_file import load_caches, save_caches
from engine.persistence.fingerprints import Fingerprints
from engine.persistence.kinds import KINDS
from engine.persistence.refusal import CacheFileError
from tests.engine.tiny_runs import RUNS, random_ids, rows_of, words

Check = Callable[..., None]
IDS = random_ids(1, 64)
SPLIT = 48  # tokens in the caches when they are saved: past the window of 16, before the slab of 256


@pytest.mark.parametrize("kind", RUNS)
def test_save_reload_continue_is_the_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    run, file = RUNS[kind], tmp_path / "cache.safetensors"
    whole = run.run(IDS, rows=24)  # 41 tokens of prompt, then one a row
    at = len(IDS) - 24
    save_caches(file, whole[SPLIT - at - 1].caches, tokens=IDS[:SPLIT])

    loaded = load_caches(file)

    assert loaded.tokens == tuple(IDS[:SPLIT])
    assert [cache.kind for cache in loaded.caches] == [cache.kind for cache in whole[SPLIT - at - 1].caches]
    rest = run.run(IDS[SPLIT:], rows=len(IDS) - SPLIT, caches=loaded.caches)
    assert rows_of(rest) == rows_of(whole)[SPLIT - at :]


@pytest.mark.parametrize(
    ("kind", "word", "fault"),
    [
        ("rotating", "rotating", lambda ring: replace(ring, index=0)),
        ("plain", "plain", lambda cache: replace(cache, values=cache.keys)),
        ("recurrent", "recurrent", lambda cache: replace(cache, state=cache.state[::-1])),
        ("quantized-b4-g32", "packed-heads", lambda heads: replace(heads, biases=heads.scales)),
    ],
)
def test_a_cache_that_comes_back_otherwise_is_seen(
    kind: str, word: str, fault: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = KINDS[word]
    faulty = replace(honest, restored=lambda value: fault(honest.restored(value)))
    monkeypatch.setitem(KINDS, word, faulty)  # type: ignore[arg-type]  # a dict beneath
    with pytest.raises((AssertionError, ValueError)):
        test_save_reload_continue_is_the_uninterrupted_run(kind, tmp_path)


@pytest.mark.parametrize("kind", RUNS)
def test_saving_what_was_loaded_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_caches(first, RUNS[kind].run(IDS[:20], rows=1)[-1].caches, tokens=IDS[:20])
    save_caches(second, load_caches(first).caches, tokens=IDS[:20])
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("kind", RUNS)
def test_caches_that_hold_nothing_yet_are_saved_like_any_other(kind: str, tmp_path: Path) -> None:
    run, file = RUNS[kind], tmp_path / "empty"
    empty = run.make_caches()
    save_caches(file, empty, tokens=())
    loaded = load_caches(file).caches
    assert [cache.kind for cache in loaded] == [cache.kind for cache in empty]
    assert rows_of(run.run(IDS[:20], rows=4, caches=loaded)) == rows_of(run.run(IDS[:20], rows=4))


@pytest.mark.parametrize("kind", ["plain", "quantized-b4-g32", "turboquant-vlm"])
@pytest.mark.parametrize("length", [255, 256])
def test_a_loaded_cache_grows_past_a_slab_as_the_saved_one_does(kind: str, length: int, tmp_path: Path) -> None:
    run, ids = RUNS[kind], random_ids(9, 260)
    caches = run.run(ids[:length], rows=1)[-1].caches
    save_caches(tmp_path / "x", caches, tokens=ids[:length])
    loaded = load_caches(tmp_path / "x").caches
    rest = ids[length:]
    assert rows_of(run.run(rest, rows=len(rest), caches=loaded)) == rows_of(
        run.run(rest, rows=len(rest), caches=caches)
    )


@pytest.mark.parametrize("kind", ["plain", "quantized-b4-g32", "rotating", "recurrent", "scan-and-plain"])
def test_a_batch_goes_on_as_if_it_had_stayed(kind: str, tmp_path: Path) -> None:
    run, file = RUNS[kind], tmp_path / "batch"
    rows = [IDS[:22], IDS[30:37]]
    batch = merged([run.run(ids, rows=1)[-1].caches for ids in rows])
    save_caches(file, batch, tokens=rows)
    loaded = load_caches(file)
    assert loaded.tokens == tuple(map(tuple, rows))
    assert [cache.kind for cache in loaded.caches] == [cache.kind for cache in batch]
    expected, actual = batch, loaded.caches
    for step in range(10):
        ids = mx.array([[step], [step + 1]])
        (left, expected), (right, actual) = (run.model.hidden(ids, caches) for caches in (expected, actual))
        assert words(left).tobytes() == words(right).tobytes()


def test_a_row_of_a_batch_with_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    run = RUNS["plain"]
    batch = merged([run.run(IDS[:length], rows=1)[-1].caches for length in (5, 3)])
    with pytest.raises(RequestError) as caught:
        save_caches(tmp_path / "x", batch, tokens=[IDS[:5], IDS[:4]])
    assert "tokens  [5, 4]\n  cache   number 0 has seen [5, 3]\n" in str(caught.value)


@pytest.mark.parametrize("offset", [255, 256, 257, 300])
def test_the_room_of_a_loaded_cache_ends_at_a_slab(
    normal: Callable[..., mx.array], same_bits: Check, tmp_path: Path, offset: int
) -> None:
    shape = (1, 2, offset, 32)
    cache, *_ = PlainCache().append(normal(0, shape), normal(1, shape))
    (packed,) = converted([cache], KVMode(bits=4, group_size=32))
    for name, one in (("plain", cache), ("packed", packed)):
        save_caches(tmp_path / name, [one], tokens=[0] * offset)
        (loaded,) = load_caches(tmp_path / name).caches
        assert {array.shape[2] for array in loaded.arrays} == {-(-offset // 256) * 256}
        for saved, array in zip(one.arrays, loaded.arrays, strict=True):
            same_bits(saved[:, :, :offset], array[:, :, :offset])


def test_bits_that_are_no_numbers_survive(same_bits: Check, tmp_path: Path) -> None:
    words = mx.array([0x7FC12345, 0xFFC00001, 0x80000000, 0x00000001, 0x7F800000, 0x3F800000], dtype=mx.uint32)
    odd = words.view(mx.float32).reshape(1, 1, 3, 2)
    half = mx.array([0x7FC1, 0xFF81, 0x8000, 0x0001, 0x7F80, 0x3F80], dtype=mx.uint16).view(mx.bfloat16)
    state = RecurrentCache(state=(odd, None, half.reshape(1, 6)), offset=3)
    save_caches(tmp_path / "odd", [state], tokens=[1, 2, 3])
    (loaded,) = load_caches(tmp_path / "odd").caches
    assert isinstance(loaded, RecurrentCache)
    assert loaded.state[1] is None
    for saved, array in zip(state.arrays, loaded.arrays, strict=True):
        same_bits(saved, array)


def test_tokens_that_are_not_those_in_the_caches_are_refused(tmp_path: Path) -> None:
    cache = RecurrentCache(state=(mx.zeros((1, 2)),), offset=3)
    with pytest.raises(RequestError) as caught:
        save_caches(tmp_path / "x", [cache], tokens=[1, 2])
    assert str(caught.value) == (
        "the tokens are not those in the caches\n"
        "  tokens  2\n"
        "  cache   number 0 has seen 3\n"
        "  next    give the prompt and every token that was fed after it, and no other"
    )
    assert not list(tmp_path.iterdir())


def test_a_cache_of_an_unknown_kind_is_not_saved(tmp_path: Path) -> None:
    class Other(RotatingCache):
        pass

    with pytest.raises(TypeError, match=r"no cache file holds caches of kind rotating-w4-k0"):
        save_caches(tmp_path / "x", [Other(max_size=4)], tokens=())
    assert not list(tmp_path.iterdir())


# What a file is refused for


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache = RotatingCache(max_size=4).append(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))[0]
    marks = Fingerprints(config="c" * 64, tokenizer="t" * 64, weights="w" * 64, dtype="f32", namespace="a+b")
    save_caches(tmp_path / "saved.safetensors", [cache], tokens=[5, 6, 7], fingerprints=marks)
    return tmp_path / "saved.safetensors"


def refusal(file: Path, **options: object) -> str:
    with pytest.raises(CacheFileError) as caught:
        load_caches(file, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_file_cut_anywhere_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in range(len(whole)):
        saved.write_bytes(whole[:length])
        assert refusal(saved).startswith("the cache file is damaged or cut short\n  file    saved.safetensors\n")


def test_a_longer_file_is_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    assert refusal(saved).startswith("the cache file is damaged or cut short\n")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_one_bit_flipped_anywhere_is_refused(saved: Path, data: st.DataObject) -> None:
    whole = saved.read_bytes()
    place = data.draw(st.integers(0, 8 * len(whole) - 1))
    changed = bytearray(whole)
    changed[place // 8] ^= 1 << place % 8
    file = saved.with_name("changed")
    file.write_bytes(changed)
    with pytest.raises(CacheFileError):
        load_caches(file)


def test_a_flipped_bit_of_a_tensor_is_told_with_the_tensors_name(saved: Path) -> None:
    changed = bytearray(saved.read_bytes())
    changed[-1] ^= 1
    saved.write_bytes(changed)
    assert refusal(saved) == (
        "the cache file is damaged or cut short\n"
        "  file    saved.safetensors\n"
        "  reason  tensor 0.values does not have the digest that was written with it\n"
        "  next    delete it and prefill the prompt again"
    )


def rewritten(file: Path, change: Callable[[dict[str, object]], None], *, digest: bool = True) -> None:
    """Change the header as a hand would, with a digest that fits again."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    outer = json.loads(raw[8 : 8 + length])
    header = json.loads(outer["__metadata__"]["header"])
    change(header)
    text = json.dumps(header)
    outer["__metadata__"]["header"] = text
    if digest:
        outer["__metadata__"]["header_digest"] = hashlib.sha256(text.encode()).hexdigest()
    new = json.dumps(outer).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def test_another_header_needs_another_digest(saved: Path) -> None:
    rewritten(saved, lambda header: header.update(tokens=[5, 6, 8]), digest=False)
    assert "reason  the header does not have the digest that was written with it" in refusal(saved)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h["caches"][0].update(kind="spiral"), "cache kind 'spiral'; known are plain, quantized"),
        (lambda h: h["caches"][0].pop("index"), "rotating has the fields"),
        (lambda h: h["caches"][0].update(sinks=4), "rotating has the fields"),
        (lambda h: h["caches"][0].update(keys={"array": "9.keys"}), "array 9.keys is missing"),
        (lambda h: h["digests"].pop("0.keys"), "tensors ['0.keys'] are in the file or in its header, not in both"),
        (lambda h: h["fingerprints"].pop("dtype"), "fingerprints ['config', 'namespace', 'tokenizer', 'weights']"),
    ],
)
def test_a_header_that_says_something_else_is_refused(
    saved: Path, change: Callable[[dict[str, object]], None], reason: str
) -> None:
    rewritten(saved, change)
    assert reason in refusal(saved)


def test_a_file_of_another_format_is_refused(saved: Path) -> None:
    mx.save_safetensors(str(saved), {"0.0": mx.zeros((1,))}, {"format": "mlx"})
    assert refusal(saved) == (
        "not a cache file of this format\n"
        "  file    saved.safetensors\n"
        "  format  mlx\n"
        "  known   mlx-assay-kv-1\n"
        "  next    read files of mlx-lm or mlx-bun with engine.persistence.mlx_lm_file or mlx_bun_file"
    )


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.safetensors") == (
        "the cache file cannot be read\n"
        "  file    none.safetensors\n"
        "  reason  No such file or directory\n"
        "  next    give the path of a saved cache"
    )


@pytest.mark.parametrize("part", ["config", "tokenizer", "weights", "dtype", "namespace"])
def test_a_file_of_another_model_is_refused_with_what_differs(saved: Path, part: str) -> None:
    mine = load_caches(saved).fingerprints
    other = replace(mine, **{part: "other"})
    assert refusal(saved, expected=other) == (
        "the cache file belongs to another model\n"
        f"  {'file':<{max(len(part), 4)}}  saved.safetensors\n"
        f"  {part:<4}  expected 'other', found {cache_file._short(getattr(mine, part))}\n"
        f"  {'next':<{max(len(part), 4)}}  load it on the model that saved it, or prefill the prompt again"
    )
    assert load_caches(saved, expected=mine).tokens == (5, 6, 7)


def test_what_one_side_does_not_know_is_not_compared_but_the_namespace_is(saved: Path) -> None:
    assert load_caches(saved, expected=Fingerprints(namespace="a+b")).tokens == (5, 6, 7)
    assert "namespace  expected '', found 'a+b'" in refusal(saved, expected=Fingerprints())


def test_as_many_caches_as_the_model_makes_are_demanded(saved: Path) -> None:
    assert "caches  expected 4, found 1" in refusal(saved, num_caches=4)
    assert len(load_caches(saved, num_caches=1).caches) == 1


def test_the_old_file_stays_when_the_new_one_cannot_be_written(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_caches(saved, [PlainCache()], tokens=())
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
