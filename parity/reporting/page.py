"""Facts as pages: one self-contained HTML file, and the same as Markdown.

Guarantees: no network, no script; every text that comes from data is escaped, so that a token `<script>` is shown and not run;
every number is printed by `at`, which reads it from the facts and marks it with the JSON pointer of its field
(`data-field="/overview/num_cases"`). Equal facts give equal pages.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from parity.reporting import plots
from parity.reporting.results import Json

PLOTTED: Final = 40  # differences that get plots; all of them get a section

_FORMATS: Final[dict[str, Callable[[Any], str]]] = {
    "text": str,
    "count": lambda value: f"{value:,}" if isinstance(value, int) else str(value),
    "number": lambda value: f"{value:.4g}" if isinstance(value, int | float) else str(value),
    "ratio": lambda value: f"{value:.2f}" if isinstance(value, int | float) else str(value),
    "list": lambda value: ", ".join(map(str, value)),
    "token": lambda value: str(value).replace("\n", "↵").replace("\t", "⇥"),
}
NOTHING: Final = "–"


def field(facts: Json, pointer: str) -> Any:  # noqa: ANN401 - any JSON value
    """The value at a JSON pointer (RFC 6901).

    Raises:
        KeyError, IndexError: There is none.
    """
    value: Any = facts
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def formatted(value: Any, form: str = "text") -> str:  # noqa: ANN401 - any JSON value
    """A value as pages print it: `text`, `count`, `number` (four digits), `ratio` (two decimals), `list`, or `token`."""
    return NOTHING if value is None else _FORMATS[form](value)


def html(facts: Json) -> str:
    """The report."""
    return _render("report.html", facts, plots=_report_plots(facts))


def markdown(facts: Json) -> str:
    """The report as Markdown."""
    return _render("report.md", facts)


def golden_html(facts: Json) -> str:
    """A golden's page; `facts` are those of `parity.reporting.golden_facts`."""
    drawing = plots.uncertainty(facts["steps"], name="uncertainty")
    return _render("golden.html", facts, plots={"/steps": drawing} if drawing else {})


def golden_markdown(facts: Json) -> str:
    """A golden as Markdown."""
    return _render("golden.md", facts)


def _report_plots(facts: Json) -> Mapping[str, Markup]:
    """Pointer of the fields that a plot draws to its SVG."""
    drawn: dict[str, Markup | None] = {}
    for number, one in enumerate(facts["differences"][:PLOTTED]):
        at = f"/differences/{number}"
        if one["first_tensor"]:
            drawn[f"{at}/first_tensor/ulp_histogram"] = plots.ulp_histogram(one["first_tensor"], name=f"ulp-{number}")
        drawn[f"{at}/rows"] = plots.kl_by_step(one["rows"], name=f"kl-{number}")
        drawn[f"{at}/modules"] = plots.ulp_by_module(one["modules"], name=f"modules-{number}")
    for number, bench in enumerate(facts["bench"]):
        drawn[f"/bench/{number}/figures"] = plots.ratios(bench.get("figures", []), name=f"ratios-{number}")
    for number, drawing in enumerate(plots.trends(facts["history"], name="trend")):
        drawn[f"/history#{number}"] = drawing
    return {pointer: drawing for pointer, drawing in drawn.items() if drawing is not None}


def _render(template: str, facts: Json, plots: Mapping[str, Markup] | None = None) -> str:
    is_html = template.endswith(".html")

    def at(pointer: str, form: str = "text") -> Markup | str:
        text = formatted(field(facts, pointer), form)
        if not is_html:
            return _plain(text)
        return Markup('<data data-field="{}" data-form="{}">{}</data>').format(pointer, form, text)

    environment = Environment(
        loader=PackageLoader("parity.reporting"),
        autoescape=is_html,  # noqa: S701 - Markdown is escaped by `at` and `plain` instead
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(at=at, plots=plots or {}, key=_key)
    environment.filters["plain"] = _plain
    text = environment.get_template(f"{template}.j2").render(facts=facts)
    return re.sub(r"\n{3,}", "\n\n", text)


def _plain(text: object) -> str:
    """Text that Markdown takes as it stands, on one line of a table; HTML in it stays text."""
    flat = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]|<>])", r"\\\1", flat).replace("&", "&amp;")


def _key(name: object) -> str:
    """A key as a part of a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")
