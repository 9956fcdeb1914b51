"""Steps from the hub's layout to the one that a family reads: nothing is lost, doubled or cast on the way."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.quantization import Quantization

Check = Callable[..., None]
ADVICE = "take a snapshot as the hub has it, or one that is converted throughout"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    tensors = {"a": mx.array([1.0, 2.0]).astype(mx.bfloat16), "b": mx.array([3.0, 4.0]).astype(mx.bfloat16)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    return Checkpoint.open(tmp_path, dtype=mx.float32, quantization=Quantization())


def test_names_and_shapes_are_told_until_a_tensor_is_taken(checkpoint: Checkpoint) -> None:
    assert (checkpoint.names, checkpoint.shape("a"), checkpoint.shape("c")) == (("a", "b"), (2,), None)
    checkpoint.take("a", (2,))
    assert (checkpoint.names, checkpoint.shape("a")) == (("b",), None)


def test_many_become_one_and_one_becomes_many(checkpoint: Checkpoint, same_bits: Check) -> None:
    checkpoint.replace(["b", "a"], ["stacked"], lambda b, a: [mx.stack([b, a])])
    assert (checkpoint.names, checkpoint.shape("stacked")) == (("stacked",), (2, 2))
    checkpoint.replace(["stacked"], ["x", "y"], list)
    same_bits(mx.array([3.0, 4.0]), checkpoint.take("x", (2,)))
    same_bits(mx.array([1.0, 2.0]), checkpoint.take("y", (2,)))
    checkpoint.finish(dropped={})


def test_nothing_is_cast_before_it_is_computed_with(checkpoint: Checkpoint, same_bits: Check) -> None:
    checkpoint.replace(["a"], ["a"], lambda a: [a + 2.0**-8])
    same_bits(mx.array([1.0, 2.0]), checkpoint.take("a", (2,)))  # what bfloat16 makes of the sum


def test_what_was_replaced_is_gone_and_what_it_became_must_be_used(checkpoint: Checkpoint) -> None:
    checkpoint.replace(["a"], ["c"], lambda a: [a])
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no tensor a\n"):
        checkpoint.take("a", (2,))
    with pytest.raises(CheckpointError, match=r"\n  tensors  b, c\n"):
        checkpoint.finish(dropped={})


@pytest.mark.parametrize(
    ("old", "new", "missing", "there_already"),
    [
        (["a", "c"], ["d"], "c", "nothing"),
        (["a"], ["b"], "nothing", "b"),
        (["c", "d", "e", "f"], ["a", "b"], "c, d, e", "a, b"),
    ],
)
def test_a_mixture_of_layouts_is_refused_and_nothing_is_changed(
    *, checkpoint: Checkpoint, old: list[str], new: list[str], missing: str, there_already: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.replace(old, new, lambda *arrays: arrays)
    assert str(caught.value) == (
        "the checkpoint mixes two layouts\n"
        f"  missing        {missing}\n"
        f"  there already  {there_already}\n"
        f"  next           {ADVICE}"
    )
    assert checkpoint.names == ("a", "b")
