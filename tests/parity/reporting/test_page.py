import json
import re
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest

from parity.reporting import page
from parity.reporting.page import field, formatted, golden_html, markdown

MARKUP = "<script>alert(1)</script>"
STATIC = {"style", "svg", "title", "dt", "th"}  # labels are keys of the facts, or words


@cache
def _drawn(facts: str) -> str:
    return page.html(json.loads(facts))


def html(facts: dict[str, Any]) -> str:
    """The page; plots take their time, so equal facts are drawn once."""
    return _drawn(json.dumps(facts))


class Page(HTMLParser):
    """What a test wants to know of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.fields: list[tuple[str, str, str]] = []
        self.untraced: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append((tag, dict(attrs)))
            if "data-field" in dict(attrs):
                self.fields.append((dict(attrs)["data-field"] or "", dict(attrs)["data-form"] or "", ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and "data-field" in self.open[-1][1]:
            pointer, form, text = self.fields[-1]
            self.fields[-1] = (pointer, form, text + data)
        elif re.search(r"\d", data) and not any(tag in STATIC for tag, _ in self.open):
            self.untraced.append(data.strip())


def test_every_number_of_the_page_is_in_a_field_of_the_json_and_says_the_same(report: dict[str, Any]) -> None:
    shown = Page(html(report))

    assert shown.untraced == []
    assert len(shown.fields) > 100
    for pointer, form, text in shown.fields:
        value = field(report, pointer)
        assert text == formatted(value, form), pointer
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert float(text.replace(",", "")) == pytest.approx(value, rel=5e-3, abs=5e-3), pointer


def test_a_number_that_no_field_holds_is_seen_by_this_test(report: dict[str, Any]) -> None:
    planted = html(report).replace("Overview</h2>", "Overview of 17 cases</h2>")

    assert Page(planted).untraced == ["Overview of 17 cases"]


def test_every_link_leads_to_an_element_of_the_page_and_ids_are_unique(report: dict[str, Any]) -> None:
    tags = Page(html(report)).tags
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    links = [attrs["href"] or "" for tag, attrs in tags if tag == "a"]

    assert len(ids) == len(set(ids))
    assert links
    assert {link for link in links if not link.startswith("#")} == set()
    assert {link[1:] for link in links} <= set(ids)


def test_the_page_loads_nothing_and_runs_nothing(report: dict[str, Any]) -> None:
    text = html(report)
    tags = Page(text).tags

    assert not [tag for tag, _ in tags if tag in ("script", "img", "iframe", "object", "embed")]
    assert not [attrs for _, attrs in tags if any(name.startswith("on") for name in attrs)]
    assert [attrs["href"] for tag, attrs in tags if tag == "link"] == ["data:,"]
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)


def test_a_token_text_that_is_markup_is_shown(report: dict[str, Any]) -> None:
    text = html(report)

    assert MARKUP not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; *" in text


def test_as_markdown_it_is_shown_too_and_keeps_its_cell(report: dict[str, Any]) -> None:
    lines = markdown(report).splitlines()
    ranks = [line for line in lines if "alert(1)" in line]

    assert len(ranks) == 10
    assert all(MARKUP not in line for line in ranks)
    assert all(len(re.split(r"(?<!\\)\|", line)) == 8 for line in ranks)


@pytest.mark.parametrize(
    "pointer",
    [
        "/differences/0/first_tensor/ulp_histogram",
        "/differences/0/rows",
        "/differences/0/modules",
        "/bench/0/figures",
        "/history#0",
    ],
)
def test_each_plot_is_there_and_names_the_fields_it_draws(pointer: str, report: dict[str, Any]) -> None:
    text = html(report)

    assert f'data-plot="{pointer}"><svg' in text
    assert field(report, pointer.partition("#")[0])


def test_sections_of_what_no_verb_has_left_are_not_there(report: dict[str, Any]) -> None:
    bare = {**report, "mutation": None, "sweep": None, "bench": [], "history": []}

    assert {attrs["id"] for _, attrs in Page(html(bare)).tags if "id" in attrs}.isdisjoint(
        {"mutation", "sweep", "bench"}
    )
    assert {"mutation", "sweep", "bench"} <= {a["id"] for _, a in Page(html(report)).tags if "id" in a}


def test_the_section_of_a_difference_says_step_module_cause_and_next(report: dict[str, Any]) -> None:
    text = re.sub(r"<[^>]+>", "", html(report))
    section = text[text.index("Differences", text.index("Overview", 600)) :]

    for told in ("model.layers.0", "logic (0.25 of the row is off)", "1 of 3", "assay explain"):
        assert told in section


def test_markdown_says_what_the_page_says(report: dict[str, Any]) -> None:
    text = markdown(report)

    for told in (
        "| first step | 1 of 3 |",
        "| earliest module | model.layers.0 |",
        "| cause | logic (0.25 of the row is off) |",
        "| llama | f32 1/1 | f32 0/1 |",
        "| decode/toy/f32/p32 | mlx-lm | tok/s | 94.94 | 24.5 | 3.88 | 3.49 to 4.26 | identical |",
        "| passing | 2 of 3 |",
        "| norm | 2 | 1 | 1 | 0 |",
        "| mlx-lm | in-pieces | 1 | 1 | 0 | 0 |",
    ):
        assert told in text.splitlines(), told


def test_a_figure_that_lacks_a_range_is_in_the_table_and_not_in_the_plot(report: dict[str, Any]) -> None:
    bare = {**report["bench"][0]["figures"][0], "low": None, "high": None}
    facts = {**report, "bench": [{**report["bench"][0], "figures": [bare], "others": {"wall": {"fast": 20.5}}}]}

    assert 'data-plot="/bench/0/figures"' not in html(facts)
    assert 'data-field="/bench/0/others/wall/fast"' in html(facts)
    assert "- wall:" in markdown(facts)


def test_a_switch_keeps_its_name_and_words_lose_their_underscores(report: dict[str, Any]) -> None:
    ground = {**report["provenance"][0], "switches": {"MLX_DISABLE_COMPILE": "1"}}
    facts = {**report, "provenance": [ground]}

    assert "<dt>MLX_DISABLE_COMPILE</dt>" in html(facts)
    assert "<dt>load before</dt>" in html(facts)
    assert r"- MLX\_DISABLE\_COMPILE: 1" in markdown(facts)


def test_the_same_facts_give_the_same_page(report: dict[str, Any]) -> None:
    assert page.html(report) == html(report)


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (1234567, "count", "1,234,567"),
        (0.000123456, "number", "0.0001235"),
        ("inf", "number", "inf"),
        (None, "number", "–"),
        (3.876, "ratio", "3.88"),
        ([1, 2], "list", "1, 2"),
        (True, "text", "True"),
        ("a\n\tb", "token", "a↵⇥b"),
    ],
)
def test_values_are_printed_as_their_form_says(value: object, form: str, text: str) -> None:
    assert formatted(value, form) == text


def test_a_pointer_reaches_keys_with_slashes() -> None:
    assert field({"a/b": [{"~": 3}]}, "/a~1b/0/~0") == 3
    with pytest.raises(KeyError):
        field({}, "/gone")


@pytest.mark.parametrize("exact", [True, False])
def test_a_golden_s_page_traces_its_numbers_too(golden_page: dict[str, Any], exact: bool) -> None:
    facts = {**golden_page, "exact": exact}
    shown = Page(golden_html(facts))

    assert shown.untraced == []
    assert MARKUP not in golden_html(facts)
    assert any(attrs.get("data-plot") == "/steps" for _, attrs in shown.tags)
    assert {f"/steps/{step}/entropy_high" in {f for f, _, _ in shown.fields} for step in range(3)} == {not exact}


def test_a_golden_of_draws_says_where_its_rows_are(golden_page: dict[str, Any]) -> None:
    text = golden_html({**golden_page, "steps": []})

    assert "the rows that were drawn from are another golden’s" in text
