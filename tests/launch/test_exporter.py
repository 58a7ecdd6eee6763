"""The process for metrics and events, beside a real launch."""

from __future__ import annotations

import json
import sys


def test_metrics_and_events_are_there_while_the_run_goes_on_and_of_its_end(bench):
    script = bench.script(
        """
        import os, time
        while not os.path.exists("told"):
            time.sleep(0.05)
        """
    )
    hook = bench.script(
        """
        import os, signal, sys
        os.kill(os.getppid(), signal.SIGUSR1)  # as SLURM tells every process of a step
        text = sys.stdin.read()
        with open("telling", "w") as file:
            file.write(text)
        os.replace("telling", "told")
        """,
        "hook.py",
    )
    launch = bench.run(
        "--log-dir", "logs", script, "--recover", "--recover-metrics-file", "run.prom", "--recover-on-event",
        f"{sys.executable} {bench.folder / hook}",
    )  # fmt: skip
    assert "killed by SIGUSR1" not in launch.err
    told = json.loads((bench.folder / "told").read_text())
    assert told["run"] == str(bench.folder / "logs")
    assert "recover_coordinator_up" in (bench.folder / "run.prom").read_text()


def test_a_command_line_that_cannot_be_watched_is_refused(bench):
    launch = bench.run(bench.script("pass"), "--recover", "--recover-metrics", "no-port", ends=2)
    assert "--recover-metrics no-port" in launch.err
