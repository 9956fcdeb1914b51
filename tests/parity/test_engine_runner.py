"""The engine's arrays as tensors: every dtype that a module puts out keeps its bits and gets its own name."""

import mlx.core as mx
import numpy as np
import pytest

from parity.engine_runner import SAFETENSORS_DTYPES, to_tensor

WORDS = [0, 1, 0x7FC0_0001, 0x8000_0000, 0xFFFF_FFFF]  # among them a NaN with a payload, and -0.0


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES)
def test_bits_leave_mlx_as_they_are(dtype: mx.Dtype) -> None:
    words = mx.array(WORDS, dtype=mx.uint32)
    expected = np.array(WORDS, dtype="<u4")
    if dtype.size == 2:
        words, expected = words.astype(mx.uint16), expected.astype("<u2")
    tensor = to_tensor(words.view(dtype))
    assert tensor.shape == (5,)
    assert tensor.bits().tolist() == expected.tolist()


@pytest.mark.parametrize(("dtype", "name", "value"), [(mx.uint32, "U32", 0xFFFF_FFFF), (mx.int32, "I32", -1)])
def test_ids_are_stored_as_the_integers_that_they_are(dtype: mx.Dtype, name: str, value: int) -> None:
    tensor = to_tensor(mx.array([[7, value]], dtype=dtype))
    assert (tensor.dtype, tensor.shape, tensor.values().tolist()) == (name, (1, 2), [[7.0, float(value)]])


def test_ids_of_a_slice_are_those_of_the_slice() -> None:
    chosen = mx.arange(12, dtype=mx.uint32).reshape(1, 3, 4)
    assert to_tensor(chosen[:, -1]).values().tolist() == [[8.0, 9.0, 10.0, 11.0]]


def test_a_dtype_without_a_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        to_tensor(mx.array([1], dtype=mx.int16))
