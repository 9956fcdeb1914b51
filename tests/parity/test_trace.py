from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parity.case import Case
from parity.errors import AssayError
from parity.tensor import Tensor
from parity.trace import Trace, activation_name, logits_name


def test_a_trace_survives_its_folder_in_order_and_bit_for_bit(
    make_case: Callable[..., Case], make_trace: Callable[..., Trace], tmp_path: Path
) -> None:
    trace = make_trace(make_case(), modules=("z", "a"))

    trace.save(tmp_path / "t")
    loaded = Trace.load(tmp_path / "t")

    assert loaded == trace
    assert list(loaded.tensors) == list(trace.tensors)


def test_nan_payloads_and_bfloat16_survive_the_folder(tmp_path: Path) -> None:
    words = np.array([[0x7FC1, 0x8000, 0xFFFF]], dtype="<u2")
    ids = Tensor.of(np.array([1], dtype="<i4"))
    trace = Trace(tensors={logits_name(0): Tensor.of(words, dtype="BF16"), "token_ids": ids})

    trace.save(tmp_path)

    assert Trace.load(tmp_path).logits(0).bits().tolist() == words.tolist()


def test_names_say_step_and_module_path() -> None:
    assert logits_name(3) == "logits/3"
    assert activation_name(3, "model.norm") == "activations/3/model.norm"


@pytest.mark.parametrize("gone", ["trace.json", "trace.safetensors"])
def test_half_a_trace_is_refused(
    make_case: Callable[..., Case], make_trace: Callable[..., Trace], tmp_path: Path, gone: str
) -> None:
    make_trace(make_case()).save(tmp_path)
    (tmp_path / gone).unlink()

    with pytest.raises(AssayError, match=r"not a trace[\s\S]*name a folder with trace.json"):
        Trace.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"order": ["logits/9"], "cache": []}', '{"cache": []}'])
def test_a_trace_that_contradicts_itself_is_refused(
    make_case: Callable[..., Case], make_trace: Callable[..., Trace], tmp_path: Path, text: str
) -> None:
    make_trace(make_case()).save(tmp_path)
    (tmp_path / "trace.json").write_text(text)

    with pytest.raises(AssayError, match="not a trace"):
        Trace.load(tmp_path)
