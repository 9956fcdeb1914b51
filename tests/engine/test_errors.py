"""The layout of the engine's messages, and that every kind is one that a caller can catch as a whole."""

import pytest

from engine.errors import CheckpointError, ConfigError, EngineError, RequestError
from parity.errors import AssayError


def test_a_message_says_what_happened_then_aligned_facts_then_the_next_step() -> None:
    error = EngineError("the weights are odd", file="a.safetensors", looked_for=["w"], next_step="fetch it again")
    assert str(error) == (
        "the weights are odd\n"
        "  file        a.safetensors\n"
        "  looked for  ['w']\n"
        "  next        fetch it again"
    )  # fmt: skip


def test_a_message_without_facts_still_names_the_next_step() -> None:
    assert str(EngineError("the prompt is empty", next_step="give a token")) == (
        "the prompt is empty\n"
        "  next  give a token"
    )  # fmt: skip


def test_the_parts_of_a_message_stay_available() -> None:
    error = EngineError("odd", count=3, next_step="mend it")
    assert (error.what, error.facts, error.next_step) == ("odd", {"count": 3}, "mend it")


@pytest.mark.parametrize(
    ("kind", "name"), [(ConfigError, "config"), (CheckpointError, "checkpoint"), (RequestError, "request")]
)
def test_every_kind_is_an_engine_error_with_a_name_of_its_own(kind: type[EngineError], name: str) -> None:
    assert issubclass(kind, EngineError)
    assert kind.kind == name


def test_the_layout_is_that_of_the_other_packages() -> None:
    facts = {"looked_at": "here", "n": 1}
    assert str(EngineError("odd", next_step="mend it", **facts)) == str(AssayError("odd", next_step="mend it", **facts))


def test_a_value_of_several_lines_is_indented_under_its_first() -> None:
    facts = {"reason": "first\nsecond"}
    assert str(EngineError("odd", next_step="mend it", **facts)) == str(AssayError("odd", next_step="mend it", **facts))
