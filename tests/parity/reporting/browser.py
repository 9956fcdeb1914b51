"""A headless browser for the tests of pages: Chromium, or Chrome, with its driver."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@contextmanager
def browser(*, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile; without one on this machine the test is skipped, and under CI fails."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver") or shutil.which("chromedriver", path=os.environ.get("CHROMEWEBDRIVER", ""))
    if program is None or driver is None:
        reason = "no Chromium with its driver here: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with TemporaryDirectory(prefix="assay-browser-") as profile:
        options = Options()
        options.binary_location = program
        for switch in SWITCHES:
            options.add_argument(switch)
        options.add_argument(f"--user-data-dir={profile}")
        options.add_argument(f"--window-size={width},{height}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        opened = webdriver.Chrome(options=options, service=Service(driver))
        try:
            # a headless window is never narrower than 500 px; the emulated screen is
            opened.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield opened
        finally:
            opened.quit()


def overflow(opened: webdriver.Chrome) -> list[str]:
    """Elements that stick out of the window's right edge and are not inside something that scrolls."""
    found: list[str] = opened.execute_script("""
        const limit = document.documentElement.clientWidth + 1;
        const scrolls = e => { for (; e; e = e.parentElement) {
            if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)) return true; } return false; };
        const out = [...document.querySelectorAll('body *')].filter(e => !e.closest('svg') && !e.matches('.skip'))
            .filter(e => e.getBoundingClientRect().right > limit && !scrolls(e))
            .map(e => e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40));
        if (document.documentElement.scrollWidth > limit) out.push('the page itself');
        return out;
    """)
    return found


def screenshot(opened: webdriver.Chrome, file: Path, *, whole: bool = False) -> None:
    """The window, or the whole page, as PNG."""
    if whole:
        height = int(opened.execute_script("return document.documentElement.scrollHeight"))
        width = int(opened.execute_script("return window.innerWidth"))
        opened.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": min(height, 8000), "deviceScaleFactor": 1, "mobile": False},
        )
    opened.save_screenshot(str(file))
