"""The site that Sphinx makes of docs/: no warning, every module, and pages that fit a desktop and a phone.

The screenshots lie in the folder of the tests (pytest's ``--basetemp`` keeps it), or in ``RECOVER_SCREENSHOTS``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

from tests.harness import REPOSITORY
from tests.harness.browser import Browser, executable
from tests.harness.processes import python
from tests.report.test_browser import OVERFLOW

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]
PAGES = ("index", "operations", "instep", "reference/command_line", "api/recover_megatron.elastic")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors from a copy of docs/, into which Sphinx writes."""
    tree = tmp_path_factory.mktemp("tree")
    for path in REPOSITORY.iterdir():
        if path.name != "docs":
            (tree / path.name).symlink_to(path)
    shutil.copytree(REPOSITORY / "docs", tree / "docs", ignore=shutil.ignore_patterns("api"))
    options = ("-q", "-W", "--keep-going", "-E", "-b", "html")
    made = python("-m", "sphinx", *options, tree / "docs", tree / "site", seconds=540)
    assert made.returncode == 0, made.stderr
    return tree / "site"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def test_the_site_is_built_without_a_warning_and_has_every_module(site: Path) -> None:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    package = REPOSITORY / "recover_megatron"
    sources = (path.relative_to(REPOSITORY) for path in package.rglob("*.py") if path.name != "__main__.py")
    modules = {
        ".".join(path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts) for path in sources
    }
    assert modules <= set(inventory.data["py:module"])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_pages_can_be_read(site: Path, browser: Browser, width: int, dark: bool, tmp_path: Path) -> None:
    shots = Path(os.environ.get("RECOVER_SCREENSHOTS", tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        browser.open(site / f"{name}.html", width=width, dark=dark)
        kept = f"site-{name.replace('/', '-')}-{width}{'-dark' if dark else ''}.png"
        browser.screenshot(shots / kept)
        assert browser.run("document.querySelector('h1').textContent.length") > 3
        assert browser.run(OVERFLOW.replace("body *", "article *")) == [], name  # drawers lie beside a narrow window
        assert browser.complaints == [], name
