"""The report's plots, each drawn from fields of its facts.

Guarantees: axes carry names and units; a value that is not known or not finite is left out of the drawing and stands in the
table beside it; logarithmic axes never swallow a zero: zeros are drawn on the axis as hollow marks.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, ScalarFormatter

from parity.reporting.results import Json
from parity.reporting.svg import DASHES, FAINT, INK, MARKERS, SERIES, axes, svg

MODULES_SHOWN: Final = 40


def ulp_histogram(tensor: Json, *, name: str) -> Markup | None:
    """Differing elements of one tensor by distance in ULP, powers of two; None where distances are not known."""
    bins = tensor["ulp_histogram"]
    if not bins:
        return None
    with axes(width=4.8, height=2.6) as (figure, ax):
        labels = ["±0" if ulp == 0 else f"{ulp:,}" if ulp < 10_000 else f"2^{ulp.bit_length() - 1}" for ulp, _ in bins]
        at = np.arange(len(bins))
        ax.bar(at, [count for _, count in bins], color=SERIES[0], width=0.8)
        ax.set_xticks(at, labels, rotation=45 if len(bins) > 8 else 0)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("distance, at least (ULP)")
        ax.set_ylabel("elements")
        return svg(figure, name=name, title=f"Differing elements of {tensor['name']} by distance in ULP")


def kl_by_step(rows: Sequence[Json], *, name: str) -> Markup | None:
    """KL divergence of each row of logits from the oracle's, in nats; None where no row's is known."""
    known = [row for row in rows if isinstance(row["kl"], float | int)]
    if not known:
        return None
    with axes(width=4.8, height=2.6) as (figure, ax):
        positive = [row for row in known if row["kl"] > 0]
        floor = min((row["kl"] for row in positive), default=1e-12) / 10
        zeros = [row for row in known if row["kl"] == 0]
        ax.plot(
            [row["step"] for row in positive], [row["kl"] for row in positive], color=SERIES[1], marker="o", ms=5, lw=1
        )
        ax.plot([row["step"] for row in zeros], [floor] * len(zeros), "o", color=SERIES[1], mfc="none", ms=6)
        ax.set_yscale("log")
        ax.set_ylim(bottom=floor / 2)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(visible=True, axis="y")
        ax.set_xlabel("step")
        ax.set_ylabel("KL (nats)\nhollow: none")
        return svg(figure, name=name, title="KL divergence from the oracle's row, by step")


def ulp_by_module(modules: Sequence[Json], *, name: str) -> Markup | None:
    """Largest distance of each recorded module's output, in execution order; None where nothing was recorded."""
    known = [module for module in modules if module["max_ulp"]][:MODULES_SHOWN]
    if not known:
        return None
    with axes(height=0.9 + 0.2 * len(known)) as (figure, ax):
        at = np.arange(len(known))
        ax.plot([module["max_ulp"] for module in known], at, "o", color=SERIES[0], ms=5)
        ax.hlines(at, 0.5, [module["max_ulp"] for module in known], color=SERIES[0], lw=1)
        ax.set_xscale("log", base=2)
        ax.set_yticks(at, [module["module"].removeprefix("model.") for module in known], fontsize=8)
        ax.set_ylim(len(known) - 0.4, -0.6)
        ax.set_xlim(left=0.5)
        ax.set_xlabel("largest distance (ULP)")
        return svg(figure, name=name, title="Largest distance of each recorded module, in execution order")


def uncertainty(steps: Sequence[Json], *, name: str) -> Markup | None:
    """Entropy of each row and surprisal of the id that followed, in nats; the entropy as a band where it is not exact."""
    if not steps:
        return None
    with axes(width=7.2, height=3.0) as (figure, ax):
        at = [step["step"] for step in steps]
        low, high = ([float(step[key]) for step in steps] for key in ("entropy_low", "entropy_high"))
        ax.fill_between(at, low, high, color=SERIES[0], alpha=0.3, lw=0)
        ax.plot(at, low, color=SERIES[0], marker="o", ms=4, lw=1, label="entropy")
        known = [step for step in steps if isinstance(step["surprisal"], float | int)]
        ax.plot(
            [step["step"] for step in known],
            [step["surprisal"] for step in known],
            color=SERIES[1],
            marker="s",
            ms=4,
            lw=1,
            ls="--",
            label="surprisal of the id that followed",
        )
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(visible=True, axis="y")
        ax.set_xlabel("step")
        ax.set_ylabel("nats")
        ax.legend(loc="best", fontsize=9)
        return svg(figure, name=name, title="Entropy and surprisal by step, in nats")


def ratios(figures: Sequence[Json], *, name: str) -> Markup | None:
    """Engine over peer of each figure that has a ratio, with the range over its pairs."""
    figures = [one for one in figures if None not in (one["ratio"], one["low"], one["high"])]
    if not figures:
        return None
    with axes(width=7.2, height=0.9 + 0.24 * len(figures)) as (figure, ax):
        at = np.arange(len(figures))
        middle = np.array([float(one["ratio"]) for one in figures])
        spread = [
            np.maximum(0, middle - [one["low"] for one in figures]),
            np.maximum(0, [one["high"] for one in figures] - middle),
        ]
        ax.axvline(1, color=INK, lw=1, ls=":")
        ax.errorbar(middle, at, xerr=spread, fmt="o", color=SERIES[0], ms=5, capsize=3, lw=1.2)
        ax.set_yticks(at, [f"{one['name']} / {one['peer']}" for one in figures], fontsize=8)
        ax.set_ylim(len(figures) - 0.4, -0.6)
        _logarithmic(ax, [*(one["low"] for one in figures), *(one["high"] for one in figures), 1.0])
        ax.grid(visible=True, axis="x")
        ax.set_xlabel("engine / peer (ratio; bar: range over the pairs)")
        return svg(figure, name=name, title="Engine over peer, with the range over the pairs")


def trends(rows: Sequence[Json], *, name: str) -> list[Markup]:
    """Ratios from run to run with their ranges, figures of one kind together; none where there are fewer than two runs.

    Args:
        rows: Of the bench history: `run`, `name`, `peer`, `ratio`, `low`, `high`; oldest run first.
        name: Prefix of the plots' names.
    """
    if len({row["run"] for row in rows}) < 2:
        return []
    kinds: dict[str, list[str]] = {}
    for row in rows:
        mine = kinds.setdefault(str(row["name"]).partition("/")[0], [])
        if (label := _labelled(row)) not in mine:
            mine.append(label)
    pieces = [
        (kind, mine[at : at + len(SERIES)]) for kind, mine in kinds.items() for at in range(0, len(mine), len(SERIES))
    ]
    return [_trend(rows, kind, labels, name=f"{name}-{number}") for number, (kind, labels) in enumerate(pieces)]


def _trend(rows: Sequence[Json], kind: str, labels: Sequence[str], *, name: str) -> Markup:
    runs = list(dict.fromkeys(row["run"] for row in rows))
    with axes(width=7.2, height=3.2) as (figure, ax):
        for number, label in enumerate(labels):
            mine = [row for row in rows if _labelled(row) == label]
            at = [runs.index(row["run"]) for row in mine]
            colour = SERIES[number]
            ax.fill_between(at, [r["low"] for r in mine], [r["high"] for r in mine], color=colour, alpha=0.2, lw=0)
            (line,) = ax.plot(at, [row["ratio"] for row in mine], color=colour, label=label, ms=5, lw=1.2)
            line.set(marker=MARKERS[number], linestyle=DASHES[number])
        ax.axhline(1, color=INK, lw=0.8, ls=":")
        ax.set_xticks(range(len(runs)), [str(run) for run in runs])
        ax.grid(visible=True, axis="y", color=FAINT)
        ax.set_xlabel("run, oldest first")
        ax.set_ylabel("engine / peer (ratio)")
        ax.set_title(kind, fontsize=10, loc="left")
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.2), fontsize=8)
        return svg(figure, name=name, title=f"{kind}: engine over peer from run to run")


def _labelled(row: Json) -> str:
    return f"{row['name']} / {row['peer']}"


def _logarithmic(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5 and their decades."""
    low, high = min(values) / 1.15, max(values) * 1.15
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    steps = [m * 10.0**e for e in range(-4, 6) for m in (1, 2, 5)]
    ax.xaxis.set_major_locator(FixedLocator([step for step in steps if low <= step <= high]))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
