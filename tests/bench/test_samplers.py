"""Samplers are measured in pairs, from the same rows; a figure of other ids says so, and where they part."""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from bench.interleave import Figure
from bench.samplers import (
    LIKELIEST,
    VOCABULARIES,
    Drawing,
    draw_rate,
    first_difference,
    likeliest,
    measure_samplers,
    rows,
    samplers,
)
from parity.errors import AssayError
from parity.sampling import NUMBERS, read_options

if TYPE_CHECKING:
    from bench.worker import Worker

WORK = Drawing(repeats=3, vocabularies=(64, 128), num_draws=4)
NAMES = [
    "greedy", "temperature", "top-p", "min-p", "top-k", "xtc", "chain",
    "logit-bias", "repetition", "presence", "frequency",
]  # fmt: skip


class Scripted:
    """A worker that draws the same ids at once; one answer of it can be altered."""

    def __init__(self, name: str, asked: list[tuple[str, dict[str, Any]]], *, seconds: float) -> None:
        self.name = name
        self.altered: tuple[int, dict[str, Any]] | None = None
        self._asked, self._seconds, self._answers = asked, seconds, 0

    def ask(self, **request: Any) -> dict[str, Any]:
        self._asked.append((self.name, request))
        self._answers += 1
        answer = {"seconds": self._seconds, "ids": list(range(request["num_draws"])), "rows": "digest of all rows"}
        if self.altered is not None and self.altered[0] == self._answers:
            answer |= self.altered[1]
        return answer


class Run:
    """Both sides, what they were asked, and what was told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.told: list[str] = []
        self.engine = Scripted("engine", self.asked, seconds=1.0)
        self.peer = Scripted("mlx-lm", self.asked, seconds=2.0)

    def __call__(self) -> dict[str, Figure]:
        engine, peer = cast("Worker", self.engine), cast("Worker", self.peer)
        return {f.name: f for f in measure_samplers(WORK, engine, peer, on_progress=self.told.append)}


def test_every_sampler_has_a_figure_at_every_vocabulary() -> None:
    figures = Run()()

    assert list(figures) == [f"sampler/{name}/v{vocabulary}" for vocabulary in (64, 128) for name in NAMES]
    top_p = figures["sampler/top-p/v64"]
    assert (top_p.unit, top_p.peer, top_p.bits_identical) == ("draws/s", "mlx-lm", True)
    assert (top_p.engine.median, top_p.peer_value.median, top_p.ratio.median, top_p.ratio.count) == (4.0, 2.0, 2.0, 3)


def test_without_saying_otherwise_the_vocabularies_are_those_of_smollm2_and_qwen() -> None:
    assert Drawing(repeats=1).vocabularies == VOCABULARIES == (49_152, 151_936)


def test_both_sides_warm_up_and_then_take_turns_in_going_first() -> None:
    run = Run()
    run()

    first = run.asked[:8]
    assert [name for name, _ in first] == [
        "engine", "mlx-lm", "engine", "mlx-lm", "mlx-lm", "engine", "engine", "mlx-lm"
    ]  # fmt: skip
    assert [request["num_draws"] for _, request in first] == [2, 2, 4, 4, 4, 4, 4, 4]


def test_both_sides_get_the_same_requests() -> None:
    run = Run()
    run()

    engine, peer = ([request for name, request in run.asked if name == side] for side in ("engine", "mlx-lm"))
    assert engine == peer
    assert {request["op"] for request in engine} == {"sample"}
    assert engine[0].keys() == {
        "op", "options", "seed", "num_rows", "vocabulary", "prompt_ids", "num_draws"
    }  # fmt: skip


@pytest.mark.parametrize("answer", [2, 3, 4])
def test_one_other_id_in_any_pair_makes_the_figure_different_and_is_told(answer: int) -> None:
    run = Run()
    run.engine.altered = (answer, {"ids": [0, 1, 9, 3]})
    figures = run()

    assert [name for name, figure in figures.items() if not figure.bits_identical] == ["sampler/greedy/v64"]
    assert [line for line in run.told if not line.startswith("sampler/")] == [
        (
            "ids of sampler/greedy/v64 are not those of mlx-lm\n"
            f"  pair      {answer - 2} of 3\n"
            "  draw      2 of 4\n"
            "  expected  2\n"
            "  actual    9\n"
            "  next      assay check 'samplers/*'"
        )
    ]


def test_fewer_ids_are_other_ids() -> None:
    pairs = [({"ids": [0, 1]}, {"ids": [0, 1, 2]})]

    told = first_difference("sampler/top-k/v64", "mlx-lm", pairs)

    assert told is not None
    assert told.splitlines()[2:4] == ["  expected  3 ids", "  actual    2 ids"]
    assert first_difference("sampler/top-k/v64", "mlx-lm", [({"ids": [5]}, {"ids": [5]})]) is None


def test_sides_that_drew_from_other_rows_are_refused() -> None:
    run = Run()
    run.peer.altered = (3, {"rows": "another digest"})

    with pytest.raises(AssayError) as caught:
        run()

    assert str(caught.value).splitlines() == [
        "engine and mlx-lm did not draw from the same rows",
        "  figure  sampler/greedy/v64",
        "  engine  digest of al",
        "  peer    another dige",
        "  next    compare how bench/samplers.py and the oracle's bench_worker.py generate rows",
    ]


def test_every_draw_counts_in_the_rate() -> None:
    assert draw_rate({"ids": [1, 2, 3], "seconds": 0.5}) == 6.0


def test_every_filter_and_penalty_of_the_chain_is_timed() -> None:
    timed = {name for options in samplers([3]).values() for name, _ in read_options(options)}

    assert timed == NUMBERS | {"top_k", "logit_bias"}


def test_rows_are_the_same_bits_everywhere_and_as_wide_as_asked() -> None:
    made = rows(42, 2, 64)

    assert (made.dtype, made.shape) == (np.float32, (2, 64))
    assert made.view(np.uint32).tobytes() == rows(42, 2, 64).view(np.uint32).tobytes()
    assert (made[0, :3] * 1024).tolist() == [-40417.0, 1445.0, 48337.0]
    assert not np.array_equal(made.view(np.uint32), rows(43, 2, 64).view(np.uint32))


def test_a_history_holds_the_likeliest_tokens_of_each_row() -> None:
    made = np.zeros((2, 64), np.float32)
    made[0, 10:15], made[1, 30:35] = np.arange(5, 0, -1), np.arange(5, 0, -1)

    assert likeliest(made) == [*range(10, 15), *range(30, 35)]
    assert len(likeliest(made)) == 2 * LIKELIEST
