"""Bytes of arrays: every dtype and layout survives bit for bit, and the libraries read what is written here."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.persistence.tensor_bytes import NAMES, decode, dtype_name, encode, from_bytes, to_bytes

Check = Callable[..., None]


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_survives(name: str) -> None:
    size = NAMES[name].size
    data = np.random.default_rng(0).integers(0, 256, 24 * size, dtype=np.uint8).tobytes()
    if name == "BOOL":
        data = bytes(byte & 1 for byte in data)
    array = from_bytes(data, name, (2, 3, 4))
    assert (dtype_name(array), array.shape) == (name, (2, 3, 4))
    assert bytes(to_bytes(array)) == data


@given(data=st.binary(max_size=64), dtype=st.sampled_from(["F16", "BF16", "F32"]))
def test_any_bits_of_a_floating_dtype_survive(data: bytes, dtype: str) -> None:
    data = data[: len(data) // 4 * 4]
    assert bytes(to_bytes(from_bytes(data, dtype, (len(data) // NAMES[dtype].size,)))) == data


def test_a_view_is_written_as_what_it_shows(same_bits: Check) -> None:
    whole = mx.arange(24, dtype=mx.float32).reshape(2, 3, 4)
    for view in (whole[:, :, 1:3], whole.swapaxes(0, 2), whole[:, ::2], mx.broadcast_to(whole[:1], (5, 3, 4))):
        same_bits(mx.contiguous(view), from_bytes(to_bytes(view), "F32", view.shape))


def test_the_libraries_read_what_is_written_here(same_bits: Check, tmp_path: Path) -> None:
    arrays = {"b": mx.arange(3), "a": mx.array([1.5, -0.0], dtype=mx.bfloat16), "none": mx.zeros((1, 0, 2))}
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"".join(encode(arrays, {"z": "1", "y": "2"})))
    loaded, metadata = mx.load(str(file), return_metadata=True)
    assert metadata == {"z": "1", "y": "2"}
    again, told = decode(file.read_bytes())
    assert told == metadata
    for name in ("a", "b"):
        same_bits(arrays[name], loaded[name])
        same_bits(arrays[name], again[name])
    assert again["none"].shape == (1, 0, 2)


def test_the_order_in_which_tensors_and_words_come_does_not_matter() -> None:
    one, two = mx.ones((2,)), mx.zeros((3,))
    assert b"".join(encode({"a": one, "b": two}, {"c": "1", "d": "2"})) == b"".join(
        encode({"b": two, "a": one}, {"d": "2", "c": "1"})
    )


def test_what_no_cache_has_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no cache file holds arrays of mlx\.core\.complex64"):
        dtype_name(mx.array([1j]))
    with pytest.raises(ValueError, match="unknown dtype F64"):
        from_bytes(bytes(8), "F64", (1,))
    with pytest.raises(ValueError, match=r"7 bytes for F32 of shape \[2\]"):
        from_bytes(bytes(7), "F32", (2,))
