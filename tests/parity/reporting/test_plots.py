import re
from typing import Any

from markupsafe import Markup

from parity.reporting import plots
from parity.reporting.svg import SERIES, axes, svg

ROW = {"step": 0, "num_different": 3, "max_ulp": 8, "flips": 0, "margin": 0.5}


def rows(*kls: float | str | None) -> list[dict[str, Any]]:
    return [{**ROW, "step": step, "kl": kl} for step, kl in enumerate(kls)]


def texts(drawing: Markup | None) -> list[str]:
    assert drawing is not None
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawing)]


def test_axes_have_names_and_units() -> None:
    assert {"step", "KL (nats)"} <= set(texts(plots.kl_by_step(rows(1e-7, 0.25), name="a")))
    histogram = {"name": "logits/0", "ulp_histogram": [[0, 1], [1, 7], [65536, 2]]}
    told = texts(plots.ulp_histogram(histogram, name="b"))
    assert {"distance, at least (ULP)", "elements", "±0", "1", "2^16"} <= set(told)
    modules = [{"module": "model.layers.0", "max_ulp": 16, "num_different": 1, "num_elements": 4}]
    assert {"layers.0", "largest distance (ULP)"} <= set(texts(plots.ulp_by_module(modules, name="c")))


def test_zeros_of_a_logarithmic_axis_are_drawn_hollow() -> None:
    drawing = plots.kl_by_step(rows(0.0, 1e-7, 0.0), name="a")

    assert drawing is not None
    assert drawing.count("fill: none; stroke: var(--series-1)") + drawing.count("fill-opacity: 0") >= 1


def test_what_is_not_known_is_not_drawn() -> None:
    assert plots.kl_by_step(rows(None, "inf"), name="a") is None
    assert plots.ulp_histogram({"name": "x", "ulp_histogram": []}, name="a") is None
    assert plots.ulp_by_module([], name="a") is None
    assert plots.uncertainty([], name="a") is None
    assert plots.ratios([], name="a") is None


def test_one_run_is_no_trend_and_kinds_have_plots_of_their_own() -> None:
    names = [f"decode/toy/p{n}" for n in range(8)] + ["load/toy"]
    runs = [
        [{"run": run, "name": n, "peer": "mlx-lm", "ratio": 2.0, "low": 1.5, "high": 2.5} for n in names]
        for run in (1, 2)
    ]

    drawn = plots.trends([*runs[0], *runs[1]], name="t")

    assert plots.trends(runs[0], name="t") == []
    assert [len([t for t in texts(one) if t.endswith("/ mlx-lm")]) for one in drawn] == [6, 2, 1]
    assert {"run, oldest first", "engine / peer (ratio)", "1", "2", "load"} <= set(texts(drawn[2]))


def test_only_the_page_s_own_colours_are_used() -> None:
    figures = [{"name": "decode", "peer": "mlx-lm", "ratio": 3.0, "low": 2.0, "high": 4.0}]

    drawing = plots.ratios(figures, name="r")

    assert drawing is not None
    assert "currentColor" in drawing
    assert "var(--series-0)" in drawing
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) <= {"#ffffff"}


def test_ids_of_two_figures_do_not_meet() -> None:
    first, second = (plots.kl_by_step(rows(0.1, 0.2), name=name) for name in ("a", "b"))
    assert first is not None
    assert second is not None

    ids = [set(re.findall(r'\bid="([^"]+)"', drawing)) for drawing in (first, second)]
    assert ids[0].isdisjoint(ids[1])
    for drawing, own in zip((first, second), ids, strict=True):
        referred = {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', drawing)}
        assert referred <= own


def test_the_same_figure_is_the_same_text() -> None:
    assert plots.kl_by_step(rows(0.1, 0.2), name="a") == plots.kl_by_step(rows(0.1, 0.2), name="a")


def test_a_title_is_escaped_and_said_to_readers() -> None:
    with axes() as (figure, ax):
        ax.plot([1, 2], color=SERIES[0])
        drawing = svg(figure, name="x", title='"><script>')

    assert 'role="img" aria-label="&#34;&gt;&lt;script&gt;"' in drawing
    assert "<script" not in drawing


def test_entropy_and_surprisal_share_an_axis_in_nats() -> None:
    step = {"step": 0, "entropy_low": 1.0, "entropy_high": 2.0, "surprisal": 0.5}
    unknown = {**step, "step": 1, "surprisal": None}

    told = texts(plots.uncertainty([step, unknown], name="u"))

    assert {"nats", "step", "entropy", "surprisal of the id that followed"} <= set(told)
