"""The report's page in a real browser (headless Chromium), for every reader: light, dark, wide, narrow, on paper.

The screenshots lie in the folder of the tests (pytest's ``--basetemp`` keeps it), or in ``RECOVER_SCREENSHOTS``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recover_megatron.report import page as page_of_report
from recover_megatron.report.full import main
from recover_megatron.run_log.events import read_run_events
from tests.harness.browser import Browser, executable
from tests.report.synthetic import write_lines, write_long_run, write_steps

pytestmark = [
    pytest.mark.skipif(executable() is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]
WIDTHS = {"wide": 1280, "tablet": 800, "narrow": 390}

OVERFLOW = """[...document.querySelectorAll('body *')].filter(e => {
    for (let p = e.parentElement; p; p = p.parentElement)
        if (p.closest('svg') || getComputedStyle(p).overflowX == 'auto') return false;
    return e.getBoundingClientRect().right > innerWidth + 1;
}).map(e => e.outerHTML.slice(0, 200)).concat(
    document.documentElement.scrollWidth > innerWidth ? ['the page is ' + document.documentElement.scrollWidth] : [])"""
"""What is wider than the window, but for what scrolls by itself."""

CUT = """[...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter(text => {
    const inner = text.getBoundingClientRect(), outer = svg.getBoundingClientRect();
    return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1;
})).map(text => text.textContent)"""
"""Texts of pictures that are cut at their edges."""

OVERLAPS = """[...document.querySelectorAll('svg')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    return texts.flatMap(([a, x], n) => texts.slice(n + 1).filter(([b, y]) =>
        Math.min(x.right, y.right) - Math.max(x.left, y.left) > 1 &&
        Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top) > 3).map(([b, y]) => a + ' | ' + b));
})"""
"""Texts of pictures that lie over each other."""

FAINT = """(() => {
    const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const light = colour => colour.slice(0, 3).map(c => c / 255).map(
        c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
    ).reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
    const below = e => {
        for (; e; e = e.parentElement) {
            const colour = rgb(getComputedStyle(e).backgroundColor);
            if (colour.length == 3 || colour[3] > 0) return light(colour);
        }
        return 1;
    };
    return [...document.querySelectorAll('body *')].filter(e => [...e.childNodes].some(
        n => n.nodeType == 3 && n.textContent.trim()) && !['STYLE', 'SCRIPT', 'title'].includes(e.tagName)
    ).map(e => {
        const style = getComputedStyle(e), text = light(rgb(e.tagName == 'text' ? style.fill : style.color));
        const [high, low] = [text, below(e)].sort((a, b) => b - a);
        return [(high + 0.05) / (low + 0.05), e.textContent.trim().slice(0, 60)];
    }).filter(([contrast, text]) => contrast < 4.5);
})()"""
"""Texts whose contrast with what lies behind them is less than 4.5 to 1 (WCAG 2, AA)."""

UNTOLD = """[...document.querySelectorAll('img, svg')].filter(e =>
    (e.getAttribute('alt') || e.getAttribute('aria-label') || '').length < 20 ||
    (e.tagName == 'IMG' && !e.naturalWidth)).map(e => e.outerHTML.slice(0, 200))"""
"""Pictures that say in no words what they show, or that could not be shown."""


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = os.environ.get("RECOVER_SCREENSHOTS")
    folder = Path(wanted) if wanted else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with two deaths."""
    pytest.importorskip("matplotlib")
    run = write_long_run(tmp_path_factory.mktemp("report") / "run")
    assert main([str(run)]) == 0
    return run / "report.html"


BAD = """<!doctype html><style>body { background: #222; color: #555; width: 2000px }</style>
<p>hardly to be read</p><img src="data:image/png;base64,AAAA" alt="a picture that is not one at all">
<svg viewBox="0 0 100 20" width="500" height="100"><text x="95" y="10" fill="#fff">cut off</text>
<text x="10" y="10" fill="#fff">one</text><text x="12" y="11" fill="#fff">two</text></svg>
<script>undefinedFunction()</script>"""


def test_what_is_looked_for_is_found(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(BAD)
    browser.open(tmp_path / "bad.html")
    assert any("the page is" in found for found in browser.run(OVERFLOW))
    assert browser.run(CUT) == ["cut off"]
    assert browser.run(OVERLAPS) == ["one | two"]
    assert [text for _, text in browser.run(FAINT)] == ["hardly to be read"]
    assert len(browser.run(UNTOLD)) == 2
    assert "undefinedFunction" in "".join(browser.complaints)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_reader_can_read_all_of_the_page(
    browser: Browser, page: Path, shots: Path, mode: str, width: str
) -> None:
    browser.open(page, WIDTHS[width], dark=mode == "dark")
    browser.screenshot(shots / f"report-{mode}-{width}.png")
    assert browser.run("innerWidth") == WIDTHS[width]
    for wrong in (OVERFLOW, CUT, OVERLAPS, FAINT, UNTOLD):
        assert browser.run(wrong) == []
    assert browser.run("document.querySelectorAll('img').length") == 4
    assert browser.run("document.querySelectorAll('svg').length") == 2
    assert browser.complaints == []


def test_on_a_wide_window_no_table_of_the_page_has_to_be_scrolled(browser: Browser, page: Path) -> None:
    browser.open(page, WIDTHS["wide"])
    cut = "[...document.querySelectorAll('table')].filter(t => t.scrollWidth > t.clientWidth).map(t => t.innerText)"
    assert browser.run("document.querySelectorAll('table').length") == 7
    assert browser.run(cut) == []


def test_the_page_is_light_or_dark_as_its_reader_is(browser: Browser, page: Path, shots: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    corners = {}
    for mode in ("light", "dark"):
        browser.open(page, WIDTHS["narrow"], dark=mode == "dark")
        corners[mode] = image.open(browser.screenshot(shots / f"corner-{mode}.png")).convert("RGB").getpixel((2, 2))
    assert min(corners["light"]) > 240
    assert max(corners["dark"]) < 50


def test_on_paper_the_page_is_dark_on_white_whatever_its_reader_has_on_the_screen(
    browser: Browser, page: Path, shots: Path
) -> None:
    browser.open(page, dark=True)
    printed = browser.print(shots / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF-")
    browser.ask("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.run(FAINT) == []
    both = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.ask("Emulation.setEmulatedMedia", media="print", features=both)
    try:
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.run("getComputedStyle(document.querySelector('rect.gone')).fill") == "rgb(221, 221, 221)"
    finally:
        browser.ask("Emulation.setEmulatedMedia", media="", features=[])


def test_an_open_page_of_a_run_that_goes_on_shows_what_was_written_since(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_of_report, "_REFRESH", 1)
    monkeypatch.setattr("recover_megatron.report.full.plot.save", lambda *_: False)
    run = write_long_run(tmp_path / "run")
    whole = {name: (run / name).read_text() for name in ("events-0.jsonl", "events.jsonl", "steps.jsonl")}
    (run / "events-0.jsonl").unlink()  # nobody has told of an end
    write_lines(run / "events.jsonl", [event for event in read_run_events(run)[0] if event["event"] != "end"])
    (run / "steps.jsonl").write_text("".join(whole["steps.jsonl"].splitlines(keepends=True)[:30]))
    main([str(run)])
    browser.open(run / "report.html")
    for name, text in whole.items():
        (run / name).write_text(text)
    main([str(run)])
    verdict = "document.querySelector('.verdict')?.innerText ?? ''"
    loads = browser.loads
    while "in each of 50 iterations" not in (text := browser.run(verdict)):
        assert not text or "in each of 30 iterations" in text
        browser.wait_for_load(loads)
        loads = browser.loads
    assert browser.run("document.querySelector('meta[http-equiv]')") is None, "it has ended, and is not loaded again"


def test_a_run_without_anything_and_one_that_failed_are_pages_too(
    browser: Browser, tmp_path: Path, shots: Path
) -> None:
    empty = write_steps(tmp_path / "empty", [])
    assert main([str(empty)]) == 0
    failed = write_long_run(tmp_path / "failed")
    lines = (failed / "steps.jsonl").read_text().splitlines(keepends=True)
    (failed / "steps.jsonl").write_text("".join(lines[:10] + lines[11:]))
    assert main([str(failed)]) == 1
    for run in (empty, failed):
        for mode in ("light", "dark"):
            browser.open(run / "report.html", WIDTHS["narrow"], dark=mode == "dark")
            browser.screenshot(shots / f"{run.name}-{mode}.png")
            assert browser.run(OVERFLOW) == []
            assert browser.run(FAINT) == []
    assert browser.complaints == []
