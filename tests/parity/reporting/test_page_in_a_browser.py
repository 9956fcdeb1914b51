"""The report in headless Chromium: no error, links that work, plots that are there, usable on a phone and by keyboard."""

from pathlib import Path
from typing import Any

import pytest

from parity.reporting import page
from tests.parity.reporting import browser as browsing


@pytest.fixture
def file(report: dict[str, Any], tmp_path: Path) -> Path:
    written = tmp_path / "report.html"
    written.write_text(page.html(report), encoding="utf-8")
    return written


def test_the_report_works_at_the_width_of_a_desk_and_of_a_phone(file: Path) -> None:
    with browsing.browser(width=1200) as opened:
        opened.get(file.as_uri())
        assert opened.title == "mlx-assay: report"
        assert opened.get_log("browser") == []

        links = opened.execute_script("""
            const seen = [];
            for (const link of document.querySelectorAll('a')) {
                const target = document.querySelector(link.getAttribute('href'));
                const box = target && target.getBoundingClientRect();
                seen.push([link.getAttribute('href'), Boolean(box && (box.width || box.height))]);
            }
            return seen;
        """)
        assert links
        assert [link for link, works in links if not works] == []

        opened.execute_script("document.querySelector('a.cell.bad').click()")
        assert opened.current_url.endswith("#difference-0")

        plots = opened.execute_script("""
            return [...document.querySelectorAll('figure svg')].map(svg => {
                const box = svg.getBoundingClientRect();
                const marks = [...svg.querySelectorAll('path, use, text')].filter(e => {
                    const b = e.getBoundingClientRect(); return b.width + b.height > 0; });
                return [box.width > 200 && box.height > 80, marks.length, svg.getAttribute('aria-label')];
            });
        """)
        assert len(plots) == 5
        assert all(large and marks > 10 and told for large, marks, told in plots)

        for width in (1200, 390):
            opened.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": False},
            )
            opened.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            assert opened.execute_script("return window.innerWidth") == width
            assert browsing.overflow(opened) == []
        assert opened.execute_script("return parseFloat(getComputedStyle(document.body).fontSize)") >= 16
        assert opened.get_log("browser") == []


def test_a_golden_s_page_fits_a_phone_too(golden_page: dict[str, Any], tmp_path: Path) -> None:
    written = tmp_path / "golden.html"
    written.write_text(page.golden_html(golden_page), encoding="utf-8")

    with browsing.browser(width=390) as opened:
        opened.get(written.as_uri())
        assert browsing.overflow(opened) == []
        assert opened.execute_script("return document.querySelectorAll('figure svg').length") == 1
        assert opened.get_log("browser") == []


def test_it_is_read_by_keyboard_and_follows_the_colour_scheme(file: Path) -> None:
    grounds = []
    for dark in (False, True):
        with browsing.browser(width=800, dark=dark) as opened:
            opened.get(file.as_uri())
            grounds.append(opened.execute_script("return getComputedStyle(document.body).backgroundColor"))
            if dark:
                continue
            reached = opened.execute_script("""
                const can = 'a[href], summary, [tabindex="0"]';
                const scrolled = [...document.querySelectorAll('.scroll, figure.wide')];
                return [document.querySelectorAll(can).length, scrolled.every(e => e.tabIndex === 0)];
            """)
            assert reached[0] > 10
            assert reached[1], "what scrolls can be scrolled by keyboard"
            body = opened.find_element("tag name", "body")
            body.send_keys("\ue004")  # tab
            active = opened.execute_script("const e = document.activeElement; return [e.className, e.offsetLeft >= 0]")
            assert active == ["skip", True], "the first stop skips to the content, and is seen"
    assert grounds == ["rgb(252, 252, 251)", "rgb(22, 24, 28)"]


def test_what_sticks_out_is_seen_by_this_test(file: Path) -> None:
    wide = file.read_text().replace("<main", '<div style="width: 700px">wide</div><main', 1)
    file.write_text(wide)

    with browsing.browser(width=390) as opened:
        opened.get(file.as_uri())
        assert browsing.overflow(opened)


def test_a_script_in_a_token_would_be_an_error_that_is_seen(file: Path) -> None:
    text = file.read_text()
    file.write_text(text.replace("</main>", "<script>console.error('ran')</script></main>"))

    with browsing.browser(width=390) as opened:
        opened.get(file.as_uri())
        assert [entry["message"].endswith('"ran"') for entry in opened.get_log("browser")] == [True]
