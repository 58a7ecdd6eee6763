"""What pip builds: pyproject.toml says most of it; here is what it cannot say.

* Beside its modules the package has patches, scripts, examples and docs, in ``recover_megatron/shipped``, where
  ``recover-tools`` finds them.
* Links of the README lead to the files of this tree, which an index does not show.  With RECOVER_PROJECT_URL (that of
  the repository, with ``/blob/main``) in the environment of the build they lead there; without it they are plain text.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
SHIPPED = (
    *("patches", "examples", "docs", "scripts/slurm", "scripts/apply_patches.sh", "scripts/prepare_corpus.py"),
    *("scripts/lib/version.sh", "scripts/lib/gpu_ranks.py", "scripts/lib/gpu_training.py"),
    *("scripts/gpu_checks.sh", "scripts/gpu_checks.py"),
    # What the GPU checks open groups with, and what they are rehearsed on.
    *("tests/__init__.py", "tests/doubles/__init__.py", "tests/doubles/epoch.py", "tests/doubles/nccl"),
)
"""No other tests: they need a checkout.  MANIFEST.in has a line for each, for an sdist."""
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


def readme(url: str) -> str:
    """The README for an index."""
    text = (HERE / "README.md").read_text(encoding="utf-8")

    def whole(link: re.Match[str]) -> str:
        image, words, path = link.groups()
        if not url:
            return "" if image else words
        base = url.replace("/blob/", "/raw/") if image else url
        return f"{image}[{words}]({base.rstrip('/')}/{path})"

    return LINK.sub(whole, text)


class Build(build_py):
    """Puts ``SHIPPED`` into a wheel; an editable installation has the tree itself."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        # What an earlier build has left here would be in the wheel, whether it is still in the tree or not.
        shutil.rmtree(Path(self.build_lib) / "recover_megatron", ignore_errors=True)
        super().run()
        for name in SHIPPED:
            source, target = HERE / name, Path(self.build_lib) / "recover_megatron" / "shipped" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "api"))
            else:
                shutil.copy2(source, target)


URL = os.environ.get("RECOVER_PROJECT_URL", "")
setup(
    cmdclass={"build_py": Build},
    long_description=readme(URL),
    long_description_content_type="text/markdown",
    project_urls={"Source": URL.split("/blob/")[0], "Documentation": f"{URL}/docs"} if URL else {},
)
