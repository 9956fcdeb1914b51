"""A change is called one only where the measured intervals leave no doubt."""

from typing import Any

import pytest

from bench.compare import compare
from bench.history import Run


def run(*figures: tuple[str, str, float, float, float]) -> Run:
    listed: list[dict[str, Any]] = [
        {"name": name, "peer": "mlx-lm", "unit": unit, "ratio": ratio, "low": low, "high": high}
        for name, unit, ratio, low, high in figures
    ]
    return Run(number=1, commit=None, noisy=(), figures=tuple(listed))


@pytest.mark.parametrize(
    ("unit", "after", "word", "worse"),
    [
        ("tok/s", (2.0, 1.9, 2.1), "within noise", False),
        ("tok/s", (2.15, 2.05, 2.3), "within noise", False),  # 2.05 / 2.1 < 1: the intervals touch
        ("tok/s", (2.5, 2.4, 2.6), "faster", False),
        ("tok/s", (1.5, 1.4, 1.6), "slower", True),
        ("s", (2.5, 2.4, 2.6), "slower", True),
        ("s", (1.5, 1.4, 1.6), "faster", False),
        ("MiB", (2.5, 2.4, 2.6), "more", True),
        ("MiB", (1.5, 1.4, 1.6), "less", False),
    ],
)
def test_a_change_is_one_beyond_the_noise_alone(
    unit: str, after: tuple[float, float, float], word: str, *, worse: bool
) -> None:
    (change,), alone = compare(run(("f", unit, 2.0, 1.9, 2.1)), run(("f", unit, *after)))
    assert (change.word, change.is_worse, alone) == (word, worse, [])


def test_the_interval_is_as_wide_as_both_intervals_allow() -> None:
    (change,), _ = compare(run(("f", "tok/s", 2.0, 1.0, 4.0)), run(("f", "tok/s", 3.0, 2.0, 6.0)))
    assert (change.before, change.after, change.change, change.low, change.high) == (2.0, 3.0, 1.5, 0.5, 6.0)


def test_figures_of_one_run_alone_are_named() -> None:
    changes, alone = compare(
        run(("f", "s", 1, 1, 1), ("g", "s", 1, 1, 1)), run(("f", "s", 1, 1, 1), ("h", "s", 1, 1, 1))
    )
    assert [change.name for change in changes] == ["f"]
    assert alone == ["g beside mlx-lm", "h beside mlx-lm"]
