import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from parity import safetensors_file
from parity.tensor import ITEMSIZE, Tensor

WORDS = np.array([[0x3F80, 0x8000, 0x7FC1], [0x0001, 0x7F80, 0x0000]], dtype="<u2")
TENSORS = {
    "b": Tensor.of(WORDS, dtype="BF16"),
    "a": Tensor(dtype="I32", shape=(0, 4), data=b""),
    "c": Tensor.of(np.array([1.5, -0.0], dtype="<f4")),
}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = int(np.prod(shape, dtype=np.int64)) * ITEMSIZE[dtype]
    return Tensor(dtype=dtype, shape=shape, data=draw(st.binary(min_size=size, max_size=size)))


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), tensors(), max_size=4))
def test_round_trip_keeps_every_bit(stored: dict[str, Tensor]) -> None:
    assert safetensors_file.loads(safetensors_file.dumps(stored)) == stored


def test_order_of_insertion_leaves_no_trace() -> None:
    assert safetensors_file.dumps(dict(reversed(TENSORS.items()))) == safetensors_file.dumps(TENSORS)


def test_mlx_reads_our_bits(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(safetensors_file.dumps(TENSORS))

    loaded = mx.load(str(file))

    assert isinstance(loaded, dict)
    assert loaded["b"].dtype == mx.bfloat16
    assert np.array(loaded["b"].view(mx.uint16)).tolist() == WORDS.tolist()
    assert loaded["a"].shape == (0, 4)


def test_the_safetensors_library_reads_our_bits(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(safetensors_file.dumps(TENSORS))

    with safe_open(file, framework="numpy") as opened:
        assert sorted(opened.keys()) == ["a", "b", "c"]
        assert opened.get_tensor("c").tobytes() == TENSORS["c"].data
        assert opened.get_slice("b").get_dtype() == "BF16"


def test_we_read_mlx_bits(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    mx.save_safetensors(str(file), {"b": mx.array(WORDS).view(mx.bfloat16)}, {"any": "metadata"})

    assert safetensors_file.loads(file.read_bytes()) == {"b": TENSORS["b"]}


@pytest.mark.parametrize("cut", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_refused_wherever_it_is_cut(cut: int) -> None:
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        safetensors_file.loads(safetensors_file.dumps(TENSORS)[:cut])


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param({"a": (0, 4), "b": (2, 6)}, id="overlap"),
        pytest.param({"a": (0, 4), "b": (6, 10)}, id="gap"),
        pytest.param({"a": (0, 4), "b": (4, 9)}, id="size"),
        pytest.param({"a": (0, 4), "b": (4, 4000)}, id="beyond-the-end"),
    ],
)
def test_a_header_that_lies_is_refused(entries: dict[str, tuple[int, int]]) -> None:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": span} for name, span in entries.items()}
    text = json.dumps(header).encode()

    with pytest.raises(ValueError, match="not a valid safetensors file"):
        safetensors_file.loads(struct.pack("<Q", len(text)) + text + bytes(10))


def test_a_header_larger_than_any_real_one_is_refused() -> None:
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        safetensors_file.loads(struct.pack("<Q", 1 << 60) + b"{}")
