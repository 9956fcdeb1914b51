"""Measurements alternate, and a figure says whether the timed logits were the same bits."""

from typing import TYPE_CHECKING, Any, cast

import pytest

from bench.interleave import Figure, Workload, decode_rate, measure, prompt

if TYPE_CHECKING:
    from bench.worker import Worker

WORK = Workload(snapshot="llama-tiny", folder="f", vocabulary=512, dtype="f32", prompts=(8,), num_tokens=4, repeats=3)


class Scripted:
    """A worker that answers at once and writes down who was asked."""

    def __init__(self, name: str, asked: list[str], *, seconds: float, logits: str = "same") -> None:
        self.name = name
        self._asked, self._seconds, self._logits = asked, seconds, logits

    def ask(self, **request: Any) -> dict[str, Any]:
        self._asked.append(f"{request['op']} {self.name}")
        if request["op"] == "load":
            return {"seconds": self._seconds}
        return {
            "prompt_seconds": self._seconds,
            "decode_seconds": self._seconds,
            "token_ids": [0] * request["num_tokens"],
            "logits": self._logits,
            "peak_bytes": 2**20,
        }


def run(*, peer_logits: str = "same") -> tuple[dict[str, Figure], list[str]]:
    asked: list[str] = []
    engine = cast("Worker", Scripted("engine", asked, seconds=1.0))
    peer = cast("Worker", Scripted("mlx-lm", asked, seconds=2.0, logits=peer_logits))
    figures = measure(WORK, engine, peer, on_progress=lambda _: None)
    return {figure.name: figure for figure in figures}, asked


def test_sides_alternate_and_take_turns_in_going_first() -> None:
    _, asked = run()

    assert asked[:6] == ["load engine", "load mlx-lm", "load mlx-lm", "load engine", "load engine", "load mlx-lm"]


def test_names_and_rates_are_those_of_the_contract() -> None:
    figures, _ = run()

    assert list(figures) == [
        "load/llama-tiny/f32",
        "prefill/llama-tiny/f32/8",
        "decode/llama-tiny/f32/p8",
        "memory/llama-tiny/f32/p8",
    ]
    prefill = figures["prefill/llama-tiny/f32/8"]
    assert (prefill.engine.median, prefill.peer_value.median, prefill.ratio.median) == (8.0, 4.0, 2.0)
    assert prefill.to_json().keys() >= {
        "name", "peer", "engine", "peer_value", "unit", "ratio", "low", "high", "bits_identical"
    }  # fmt: skip


@pytest.mark.parametrize(("peer_logits", "identical"), [("same", True), ("other", False)])
def test_a_figure_of_other_bits_says_so(peer_logits: str, identical: bool) -> None:
    figures, _ = run(peer_logits=peer_logits)

    assert figures["decode/llama-tiny/f32/p8"].bits_identical is identical
    assert figures["load/llama-tiny/f32"].bits_identical is None


def test_the_first_token_counts_on_the_decode_clock() -> None:
    assert decode_rate({"token_ids": [1, 2, 3, 4], "decode_seconds": 2.0}) == 2.0


def test_prompts_are_the_same_everywhere_and_inside_the_vocabulary() -> None:
    assert prompt(4, 512) == prompt(4, 512)
    assert len(prompt(32, 10)) == 32
    assert max(prompt(1000, 10)) <= 9
