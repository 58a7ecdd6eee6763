"""The API reference is made from the docstrings of all modules, without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.patience import patient

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_api_reference_has_every_module_and_no_warning(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "api_reference.py", tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(540),
    )
    assert made.returncode == 0, made.stderr
    modules = (path.relative_to(ROOT) for path in (ROOT / "recover_megatron").rglob("*.py"))
    pages = {str(path.parent if path.name == "__init__.py" else path.with_suffix("")) for path in modules}
    missing = [page for page in pages if not page.endswith("__main__") and not (tmp_path / f"{page}.html").is_file()]
    assert not missing
