"""matplotlib figures as SVG inside a page: the page's own colours, fonts and light or dark scheme.

Guarantees: the same figure gives the same text; ids are unique within a page, since each carries the figure's name; text stays
text, so that it can be read aloud and searched. Colours are those of Okabe and Ito, which stay apart for colour-blind readers,
and every series has a marker or a dash of its own besides.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stand-ins drawn by matplotlib and replaced by the page's variables; no other colour may be used in a figure.
INK: Final = "#010203"
FAINT: Final = "#040506"
SERIES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS: Final = ("o", "s", "^", "D", "v", "P")
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


@contextmanager
def axes(*, width: float = 6.4, height: float = 2.8) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one pair of axes in the report's style, sizes in inches."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def svg(figure: Figure, *, name: str, title: str) -> Markup:
    """The figure as an `<svg>` element.

    Args:
        figure: Drawn within `axes`.
        name: Prefix of every id in it, unique in the page; letters, digits and dashes.
        title: What it shows, for those who cannot see it.
    """
    out = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    for number, colour in enumerate(SERIES):
        text = text.replace(colour, f"var(--series-{number})")
    text = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font: \1 var(--font)", text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return Markup(f'{head} role="img" aria-label="{Markup.escape(title)}">{rest}')  # noqa: S704 - made here, title escaped
