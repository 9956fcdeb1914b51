import json
import struct
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from parity import safetensors_file
from parity.models.weights_file import known_order, write_weights
from parity.tensor import Tensor

TENSORS = {
    "b": Tensor.of(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "a": Tensor.of(np.array([7, 8], dtype=np.uint32)),
    "c": Tensor(dtype="BF16", shape=(1,), data=b"\x80\x3f"),
}


def test_data_lie_in_the_given_order_and_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_weights(path, TENSORS, ["c", "a", "b"])
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    assert list(header) == ["__metadata__", "a", "b", "c"]
    assert [header[name]["data_offsets"] for name in "cab"] == [[0, 2], [2, 10], [10, 34]]
    assert safetensors_file.loads(data) == TENSORS
    assert set(mx.load(str(path))) == set(TENSORS)


def test_another_order_is_another_file_with_the_same_tensors(tmp_path: Path) -> None:
    one, other = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    tensors = {name: TENSORS[name] for name in "ab"}
    write_weights(one, tensors, ["a", "b"])
    write_weights(other, tensors, ["b", "a"])
    assert one.read_bytes() != other.read_bytes()
    assert all(np.array_equal(load_file(one)[name], load_file(other)[name]) for name in tensors)


@pytest.mark.parametrize("order", [["a", "b"], ["a", "b", "c", "c"], ["a", "b", "d"]])
def test_an_order_that_is_not_one_is_refused(tmp_path: Path, order: list[str]) -> None:
    with pytest.raises(ValueError, match="every tensor once"):
        write_weights(tmp_path / "w.safetensors", TENSORS, order)
    assert not (tmp_path / "w.safetensors").exists()


def test_without_a_key_the_order_is_by_name() -> None:
    assert known_order(None, ["b", "a"]) == ["a", "b"]


def test_a_kept_order_is_a_permutation_of_its_tensors_and_of_no_others() -> None:
    assert (files("parity.models") / "tensor_order.toml").is_file()
    for key, count in (("dense", 272), ("packed", 694)):
        names = [f"{i:04}" for i in range(count)]
        assert sorted(known_order(key, names)) == names
        with pytest.raises(ValueError, match=f"for {count} tensors, there are {count - 1}"):
            known_order(key, names[1:])
