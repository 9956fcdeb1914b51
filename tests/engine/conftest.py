"""What the tests of the engine share: comparing bits, measuring ULPs, and making small snapshots.

Guarantees: two arrays are compared as the unsigned words that they are stored as, dtype and shape included; a ULP distance
is an integer. The fixtures are functions without state, so one serves a whole session.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.model import CausalModel, open_model
from parity.models.tiny import write_tiny
from parity.models.tiny_shapes import shapes

Words = npt.NDArray[np.unsignedinteger[Any]]
Bits = Callable[[Any], Words]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def _bits(array: Any) -> Words:
    if isinstance(array, mx.array):
        return np.array(array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size]))
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _kind(array: Any) -> tuple[str, tuple[int, ...]]:
    return str(array.dtype).removeprefix("mlx.core."), tuple(array.shape)


def _differing(expected: Any, actual: Any) -> npt.NDArray[np.intp]:
    assert _kind(expected) == _kind(actual)
    return np.argwhere(_bits(expected) != _bits(actual))


@pytest.fixture(scope="session")
def bits() -> Bits:
    """The stored words of an array, for indexing and comparing."""
    return _bits


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Any, Any], None]:
    """Assert that two arrays have one dtype, one shape and the same words."""

    def check(expected: Any, actual: Any) -> None:
        where = _differing(expected, actual)
        assert not len(where), f"{len(where)} of {actual.size} elements differ, first at {where[0].tolist()}"

    return check


@pytest.fixture(scope="session")
def other_bits() -> Callable[[Any, Any], None]:
    """Assert that two arrays have one dtype and one shape, and differ in at least one word."""

    def check(expected: Any, actual: Any) -> None:
        assert len(_differing(expected, actual)), "bit-identical where a difference is due"

    return check


@pytest.fixture(scope="session")
def ulps() -> Callable[[Any, Any], int]:
    """The largest distance of two float arrays in units in the last place, of float64, float32 or bfloat16."""

    def ordered(array: Any) -> npt.NDArray[np.object_]:
        words = _bits(array)
        sign = 1 << (8 * words.itemsize - 1)
        values = words.astype(object)  # Python integers: 64-bit words do not fit a signed type when negated
        return np.where(words >= sign, sign - values, values)

    def distance(expected: Any, actual: Any) -> int:
        assert _kind(expected) == _kind(actual)
        return int(np.abs(ordered(expected) - ordered(actual)).max())

    return distance


@pytest.fixture(scope="session")
def normal() -> Callable[..., mx.array]:
    """Normally distributed values of a seed: `normal(seed, shape, dtype)`."""

    def make(seed: int, shape: Iterable[int], dtype: mx.Dtype = mx.float32) -> mx.array:
        values = np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32)
        return mx.array(values).astype(dtype)

    return make


@pytest.fixture(scope="session")
def write_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a fresh snapshot of a two-layer llama, with changes to its config, and return its folder."""

    def write(*, seed: int = 0, stored: str = "F32", **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("llama")
        config = LLAMA | changes
        write_tiny(folder, config, shapes(config), seed=seed, dtype=stored)
        return folder

    return write


@pytest.fixture(scope="session")
def llama(write_llama: Callable[..., Path]) -> Callable[..., CausalModel]:
    """Open a two-layer llama; equal arguments give the same model."""
    opened: dict[str, CausalModel] = {}

    def get(dtype: str = "f32", **changes: Any) -> CausalModel:
        key = json.dumps([dtype, changes], sort_keys=True)
        if key not in opened:
            opened[key] = open_model(write_llama(**changes), dtype=dtype)  # type: ignore[arg-type]
        return opened[key]

    return get


@pytest.fixture(scope="session")
def edit_json() -> Callable[..., None]:
    """Change keys of a JSON file; a value of ... removes the key."""

    def edit(file: Path, **changes: Any) -> None:
        merged = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in merged.items() if value is not ...}))

    return edit


@pytest.fixture(scope="session")
def edit_weights() -> Callable[..., None]:
    """Change tensors of a snapshot's one weight file; None removes one."""

    def edit(folder: Path, changes: dict[str, mx.array | None]) -> None:
        file = folder / "model.safetensors"
        tensors = mx.load(str(file)) | changes  # type: ignore[operator]
        tensors = {name: array for name, array in tensors.items() if array is not None}
        mx.eval(list(tensors.values()))  # before its source is overwritten
        mx.save_safetensors(str(file), tensors)

    return edit
