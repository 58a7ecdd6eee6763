"""The launcher reaps what it inherits, beside threads that have children of their own."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from recover_megatron.launch import processes
from recover_megatron.launch.processes import Subreaper


@pytest.fixture
def reaper(monkeypatch: pytest.MonkeyPatch) -> Subreaper:
    """One that leaves this process what it is."""
    monkeypatch.setattr(processes, "become_subreaper", lambda: None)
    return Subreaper()


def test_a_child_that_another_thread_has_reaped_meanwhile_ends_nothing_and_hides_no_other(
    reaper: Subreaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`import torch`, in a thread, asks ldconfig: its process ends between two calls of the launcher's."""
    children = [subprocess.Popen(["true"]) for _ in range(2)]
    seen = [os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) for child in children]
    reaped_elsewhere, inherited = children
    assert reaped_elsewhere.wait() == 0
    answers: list[Any] = [*seen, None]
    monkeypatch.setattr(os, "waitid", lambda *how: answers.pop(0))

    reaper.reap(set())

    assert not answers
    with pytest.raises(ChildProcessError):
        os.waitpid(inherited.pid, os.WNOHANG)
    inherited.wait()
