"""Processes for the tests of the host device, which changes a process for good."""

import json
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from tests.harness.patience import patient
from tests.harness.processes import python

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def _zygote():
    command = [sys.executable, str(HERE / "zygote.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        yield process
        process.stdin.close()
        assert process.wait(timeout=patient(60)) == 0


@pytest.fixture
def in_process(_zygote, tmp_path):
    """Run code in a process of its own that has torch imported; its output, or AssertionError with it."""

    def run(code, path=(), **environment):
        output = tmp_path / "output"
        job = {"code": textwrap.dedent(code), "output": str(output), "path": [*map(str, path)]}
        _zygote.stdin.write(json.dumps({**job, "environment": environment}) + "\n")
        _zygote.stdin.flush()
        status = int(_zygote.stdout.readline())
        text = output.read_text()
        assert status == 0, f"the code ended with status {status}:\n{text}"
        return text

    return run


@pytest.fixture
def fresh_python(tmp_path):
    """Run a new interpreter with these arguments; the finished process."""
    return partial(python, cwd=tmp_path, OMP_NUM_THREADS="1")
