from pathlib import Path

import numpy as np
import pytest

from parity import row_store
from parity.case import KV, Case, Feed
from parity.platform_key import platform_key
from parity.row_store import RowStoreWarning
from parity.tensor import Tensor

CASE = Case(
    name="real/f32/fp/greedy/p1",
    snapshot="real",
    dtype="f32",
    prompt_ids=(1,),
    forced_ids=None,
    feed=Feed(mode="whole"),
    kv=KV(),
    num_steps=1,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))
    return tmp_path


def tensors(seed: int = 0) -> dict[str, Tensor]:
    draw = np.random.Generator(np.random.PCG64(seed))
    return {f"logits/{i}": Tensor.of(draw.standard_normal((1, 8)).astype("<f4")) for i in (1, 0)}


def digests(seed: int = 0) -> dict[str, str]:
    return {name: tensor.digest for name, tensor in tensors(seed).items()}


def test_rows_come_back_bit_for_bit_in_the_goldens_order(home: Path) -> None:
    row_store.save(CASE, "1.0", tensors())
    assert row_store.rows_path(CASE, "1.0") == home / "rows/mlx-lm-1.0" / platform_key() / f"{CASE.name}.safetensors"
    loaded = row_store.load(CASE, "1.0", digests())
    assert loaded == tensors()
    assert list(loaded) == ["logits/1", "logits/0"]


def test_absent_rows_are_none_without_a_word() -> None:
    assert row_store.load(CASE, "1.0", digests()) is None
    row_store.save(CASE, "1.1", tensors())
    assert row_store.load(CASE, "1.0", digests()) is None


def test_a_tensor_that_is_not_the_goldens_makes_all_absent_and_is_reported() -> None:
    row_store.save(CASE, "1.0", tensors())
    wanted = digests() | {"logits/0": digests(1)["logits/0"]}
    with pytest.warns(RowStoreWarning) as warned:
        assert row_store.load(CASE, "1.0", wanted) is None
    assert str(warned[0].message) == (
        "stored rows of real/f32/fp/greedy/p1 are not used: 1 of 2 tensors are not the golden's, first logits/0; "
        "assay record 'real/f32/fp/greedy/p1' makes them again"
    )


def test_a_tensor_that_is_missing_makes_all_absent() -> None:
    row_store.save(CASE, "1.0", {"logits/0": tensors()["logits/0"]})
    with pytest.warns(RowStoreWarning, match="first logits/1"):
        assert row_store.load(CASE, "1.0", digests()) is None


@pytest.mark.parametrize("from_end", [1, 20, 64])
def test_a_flipped_bit_is_found(from_end: int) -> None:
    row_store.save(CASE, "1.0", tensors())
    file = row_store.rows_path(CASE, "1.0")
    data = bytearray(file.read_bytes())
    data[-from_end] ^= 1
    file.write_bytes(bytes(data))
    with pytest.warns(RowStoreWarning):
        assert row_store.load(CASE, "1.0", digests()) is None


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_truncated_file_is_absent_and_reported(size: int) -> None:
    row_store.save(CASE, "1.0", tensors())
    file = row_store.rows_path(CASE, "1.0")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.warns(RowStoreWarning, match="unreadable"):
        assert row_store.load(CASE, "1.0", digests()) is None
