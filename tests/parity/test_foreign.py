import json
from pathlib import Path

import numpy as np
import pytest

from parity.errors import UsageError
from parity.foreign import is_foreign, load_foreign, widened
from parity.tensor import Tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "f", "mini", rows=3)
    return tmp_path / "f"


def write(folder: Path, prefix: str, *, rows: int, promised: int = 3, vocabulary: int = 5) -> None:
    folder.mkdir(exist_ok=True)
    described = {
        "model": "org/mini",
        "snapshot": "/somewhere/else",
        "prompt": "hi",
        "prompt_ids": [1, 2],
        "greedy_ids": [4] * promised,
        "logit_steps": promised,
        "vocab_size": vocabulary,
    }
    (folder / f"{prefix}-parity.json").write_text(json.dumps(described))
    for step in range(rows):
        row = np.arange(vocabulary, dtype="<f4") + np.float32(step)
        (folder / f"{prefix}-logits-step{step}.bin").write_bytes(row.tobytes())


@pytest.mark.parametrize("name", ["", "mini", "mini-parity.json"])
def test_a_golden_is_read_by_folder_prefix_or_json(folder: Path, name: str) -> None:
    path = folder / name

    golden = load_foreign(path)

    assert is_foreign(path)
    assert (golden.name, golden.model, golden.token_ids, golden.promised) == ("mini", "org/mini", (4, 4, 4), 3)
    assert [row.shape for row in golden.rows] == [(1, 5)] * 3
    assert golden.rows[2].values().tolist() == [[2, 3, 4, 5, 6]]


def test_rows_that_are_not_on_disk_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "f", "mini", rows=2, promised=9)

    golden = load_foreign(tmp_path / "f")

    assert (len(golden.rows), golden.promised) == (2, 9)


def test_one_of_several_must_be_named(folder: Path) -> None:
    write(folder, "other", rows=1)

    with pytest.raises(UsageError) as error:
        load_foreign(folder)

    assert str(error.value).splitlines() == [
        "f holds 2 foreign goldens",
        "  found  mini-parity.json",
        "         other-parity.json",
        "  next   name one of these files",
    ]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("mini-logits-step1.bin", b"1234", "4 bytes where 20 belong"),
        ("mini-logits-step0.bin", None, "no mini-logits-step0.bin beside it"),
        ("mini-parity.json", b"{", "JSONDecodeError"),
        ("mini-parity.json", b"{}", "KeyError: 'vocab_size'"),
        ("mini-parity.json", b"[]", "TypeError"),
    ],
)
def test_a_malformed_golden_is_refused(folder: Path, name: str, content: bytes | None, fault: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)

    with pytest.raises(UsageError, match=f"a foreign golden cannot be read[\\s\\S]*{fault}"):
        load_foreign(folder)


def test_a_missing_golden_is_refused(tmp_path: Path) -> None:
    assert not is_foreign(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_foreign(tmp_path / "x-parity.json")


def test_widening_is_exact() -> None:
    words = np.array([[0x3F9D, 0x8000, 0x7F80]], dtype="<u2")

    assert widened(Tensor.of(words, dtype="BF16")).bits().tolist() == [[0x3F9D0000, 0x80000000, 0x7F800000]]
    row = Tensor.of(np.array([[1.5]], dtype="<f4"))
    assert widened(row) is row
