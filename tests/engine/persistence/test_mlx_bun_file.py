"""mlx-bun's third format is read by structure: caches in its documented layout go on, and everything else is refused."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.convert import KVMode, converted
from engine.cache.plain import PlainCache
from engine.cache.protocol import Cache
from engine.cache.quantized import QuantizedCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.rotating import RotatingCache
from engine.persistence.mlx_bun_file import load_mlx_bun
from engine.persistence.refusal import CacheFileError
from engine.persistence.tensor_bytes import to_bytes

Check = Callable[..., None]
Header = dict[str, Any]
NUMBERS = {mx.bool_: 0, mx.uint8: 1, mx.uint32: 3, mx.float16: 9, mx.float32: 10, mx.bfloat16: 12}
TOKENS = 11


def entry_of(cache: Cache) -> tuple[Header, list[mx.array]]:
    if isinstance(cache, PlainCache):
        return {"kind": "kv"}, [array[:, :, : cache.offset] for array in cache.arrays]
    if isinstance(cache, QuantizedCache):
        marks = {"kind": "qkv", "groupSize": cache.keys.group_size, "bits": cache.keys.bits}
        return marks, [array[:, :, : cache.offset] for array in cache.arrays]
    if isinstance(cache, RotatingCache):
        return {"kind": "rotating", "idx": cache.index, "maxSize": cache.max_size}, list(cache.arrays)
    return {"kind": "ssm"}, list(cache.arrays)


def written(file: Path, caches: Sequence[Cache], change: Callable[[Header], object] = lambda _: None) -> Path:
    """A file in the layout of spec/kv.md section 12; hashes are left at zero, as nobody here can compute them."""
    body, entries = b"", []
    for cache in caches:
        entry, arrays = entry_of(cache)
        entry |= {"offset": cache.offset, "tensors": []}
        for array in arrays:
            mx.eval(array)
            body += b"\0" * (-len(body) % 16384)
            place = {"off": len(body), "bytes": array.nbytes, "shape": array.shape, "dtype": NUMBERS[array.dtype]}
            entry["tensors"].append(place | {"hash": "0" * 16})
            body += bytes(to_bytes(array))
        entries.append(entry)
    header: Header = {"formatVersion": 3, "createdAt": 0, "modelId": "tiny", "ns": "", "tokens": list(range(TOKENS))}
    header["caches"] = entries
    change(header)
    text = json.dumps(header).encode()
    start = -(-(26 + len(text)) // 16384) * 16384
    head = b"MLXBUNKV2\n" + struct.pack("<IIQ", len(text), start, 0) + text
    file.write_bytes(head + b"\0" * (start - len(head)) + body)
    return file


def plain(seed: int, width: int, dtype: mx.Dtype = mx.bfloat16) -> PlainCache:
    keys, values = (mx.random.normal((1, 2, TOKENS, width), key=mx.random.key(seed + i)) for i in (0, 1))
    return PlainCache().append(keys.astype(dtype), values.astype(dtype))[0]


def ring() -> RotatingCache:
    made = RotatingCache(max_size=6)
    for step, L in enumerate((8, 1, 1, 1)):
        new = mx.random.normal((1, 1, L, 4), key=mx.random.key(30 + step))
        made, *_ = made.append(new, new * 2)
    return made


def every_kind() -> list[Cache]:
    state = (mx.random.normal((1, 3, 8), key=mx.random.key(9)).astype(mx.bfloat16), mx.ones((1, 2, 4, 4)))
    quantized = converted([plain(40, 64)], KVMode(bits=4, group_size=32))
    return [plain(1, 8), ring(), *quantized, RecurrentCache(state=state, offset=TOKENS)]


def test_every_kind_that_a_family_here_has_is_read_and_goes_on(same_bits: Check, tmp_path: Path) -> None:
    caches = every_kind()
    read = load_mlx_bun(written(tmp_path / "kv", caches), num_caches=4)
    assert [cache.kind for cache in read.caches] == ["plain", "rotating-w6-k0", "quantized-b4-g32", "arrays-2"]
    assert read.tokens == tuple(range(TOKENS))
    assert read.model == {"modelId": "tiny", "ns": ""}
    for expected, actual in zip(caches, read.caches, strict=True):
        assert actual.offset == TOKENS
        if isinstance(expected, RecurrentCache):
            pairs = list(zip(expected.arrays, actual.arrays, strict=True))
        else:
            width = {"plain": 8, "rotating-w6-k0": 4, "quantized-b4-g32": 64}[expected.kind]
            dtype = mx.float32 if isinstance(expected, RotatingCache) else mx.bfloat16
            new = mx.random.normal((1, 1 if width == 4 else 2, 1, width)).astype(dtype)
            longer = [cache.append(new, new)[0] for cache in (expected, actual)]  # type: ignore[attr-defined]
            pairs = [
                (a[:, :, : TOKENS + 1], b[:, :, : TOKENS + 1])
                for a, b in zip(longer[0].arrays, longer[1].arrays, strict=True)
            ]
        for left, right in pairs:
            same_bits(left, right)


def test_bfloat16_has_two_numbers_and_both_are_read(same_bits: Check, tmp_path: Path) -> None:
    def older(header: Header) -> None:
        for tensor in header["caches"][0]["tensors"]:
            tensor["dtype"] = 11

    cache = plain(1, 8)
    (read,) = load_mlx_bun(written(tmp_path / "kv", [cache], older)).caches
    same_bits(cache.arrays[0], read.arrays[0])


def refusal(file: Path, **options: Any) -> str:
    with pytest.raises(CacheFileError) as caught:
        load_mlx_bun(file, **options)
    return str(caught.value)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(b"MLXBUNKV1\n" + bytes(100))
    assert refusal(tmp_path / "kv") == (
        "not a cache file of mlx-bun\n"
        "  file    kv\n"
        "  begins  'MLXBUNKV1\\n'\n"
        "  known   'MLXBUNKV2\\n'\n"
        "  next    read own files with engine.persistence.cache_file"
    )


def test_another_version_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "kv", [], lambda header: header.update(formatVersion=4))
    assert refusal(file) == (
        "a cache file of mlx-bun in another version\n"
        "  file     kv\n"
        "  version  4\n"
        "  known    3\n"
        "  next     save it again with mlx-bun 0.2 to 0.4"
    )


def test_another_number_of_caches_is_another_model(tmp_path: Path) -> None:
    assert "caches  expected 4, found 1" in refusal(written(tmp_path / "kv", [plain(1, 8)]), num_caches=4)


@pytest.mark.parametrize("kind", ["turboquant", "mla", "mla-dsa", "mtp-mla", "rotating-qkv"])
def test_a_kind_without_an_equal_here_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path / "kv", [plain(1, 8)], lambda header: header["caches"][0].update(kind=kind))
    assert refusal(file) == (
        "the file holds a kind of cache that has no equal here\n"
        "  file   kv\n"
        f"  kind   {kind}\n"
        "  known  kv, rotating, qkv, ssm\n"
        "  next   prefill the prompt again"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h["caches"][0]["tensors"].pop(), "1 tensors in an entry of kind kv"),
        (lambda h: h["caches"][0]["tensors"][1].update(bytes=10**9), "does not lie in the file"),
        (lambda h: h["caches"][0]["tensors"][1].update(off=3), "does not lie in the file"),
        (lambda h: h["caches"][0]["tensors"][0].update(dtype=10), "bytes for F32 of shape [1, 2, 11, 8]"),
        (lambda h: h["caches"][0]["tensors"][0].update(dtype=99), "dtype number 99"),
        (lambda h: h["caches"][0].update(offset=12), "11 positions in an entry that has seen 12"),
        (lambda h: h.update(tokens=[1, 2]), "2 tokens, but a cache has seen 11"),
        (lambda h: h["caches"][1].update(idx=7), "a ring of 6 positions is written at 7"),
        (lambda h: h["caches"][2].update(bits=8), "8 bits, groups of 32"),
        (lambda h: h.pop("caches"), "'caches'"),
    ],
)
def test_a_header_that_does_not_fit_its_tensors_is_refused(
    tmp_path: Path, change: Callable[[Header], object], reason: str
) -> None:
    message = refusal(written(tmp_path / "kv", every_kind(), change))
    assert message.startswith("the cache file is damaged or cut short\n  file    kv\n")
    assert reason in message


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "kv", every_kind())
    whole = file.read_bytes()
    for length in (10, 20, 26, 5000, 16384, 40000, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert refusal(file).startswith("the cache file is damaged or cut short\n")
