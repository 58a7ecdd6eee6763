"""The wheels of the Megatrons that have a patch, from the package index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.patience import patient

WHEELS = {"0.18.2": "core_v0.18.2", "0.19.0": "core_v0.19.0", "0.19.2": "core_v0.19.0"}
"""Version -> the patch that is its."""


@pytest.fixture(scope="session", params=WHEELS)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(version, unpacked wheel); nobody may change it."""
    version, out = request.param, tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(out)]
    done = subprocess.run([*command, f"megatron-core=={version}"], capture_output=True, text=True, timeout=patient(300))
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"NOT TESTED: Megatron {version}: pip could not download its wheel: {reason}")
    (archive,) = out.glob("*.whl")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(out / "tree")
    return version, out / "tree"
