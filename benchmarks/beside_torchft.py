"""Measure torchft: from SIGKILL of a replica to the first committed all-reduce among the survivors.

bench_recovery.py --beside torchft creates an environment with torchft (``Torchft``), and runs this file in it.  Each
line on stdin is a request for one recovery, as JSON: workers, gib, setting, victim, pause, ...  The answer is a line on
stdout with the milliseconds of the recovery.

Each replica is one process, forked from this one after the import of torch and torchft; all replicas use one
lighthouse.  A step is as in torchft's examples, without a model: start_quorum, allreduce, should_commit.  The recovery
ends when the last survivor has committed a step with one participant fewer.  torchft detects a death itself, by missing
heartbeats and by errors and timeouts of gloo.  A survivor with a connection to the dead replica gets an error without
delay; a survivor without such a connection waits for the timeout of gloo.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import venv
from datetime import timedelta
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import FORK, REPOSITORY, forked, occupy, strike

FOLDER = REPOSITORY / "build" / "beside-torchft"
LOG = REPOSITORY / "build" / "beside-torchft.log"
PINNED = ("torchft==0.2.0", "torch==2.15.0")
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"lighthouse": [], "heartbeat": None, "group": None},
    "example": {"lighthouse": [], "heartbeat": None, "group": 5.0},
    "tuned": {
        "lighthouse": ["--heartbeat_timeout_ms", "300", "--quorum_tick_ms", "10"],
        "heartbeat": 0.05,
        "group": 2.0,
    },
}
"""Name of a setting -> its values.  "lighthouse": flags of the lighthouse.  "heartbeat": seconds between a manager's
heartbeats.  "group": timeout of gloo's operations in seconds.  None: torchft's default."""


class Torchft:
    """Context manager that runs this file in an environment with torchft, and measures recoveries there."""

    def __enter__(self) -> Torchft:
        """Create the environment if it does not exist, and start this file in it.

        Raises CalledProcessError if torchft cannot be installed.
        """
        python = FOLDER / "bin" / "python"
        if not python.exists():
            venv.create(FOLDER, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINNED], check=True)
        with open(LOG, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return self

    def recovery(self, **request: Any) -> dict[str, float]:
        """Measure one recovery; return its milliseconds as "total".  Raises RuntimeError if torchft fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"torchft did not recover; its log is {LOG}")
        return {"total": float(answer)}

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def lighthouse(port: int, flags: list[str]) -> subprocess.Popen[bytes]:
    """Start torchft's lighthouse on the loopback."""
    program = str(Path(sys.executable).parent / "torchft_lighthouse")
    command = [program, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def work(port: int, request: dict[str, Any], occupied: Barrier, me: int, report: TextIO) -> None:
    """Run one replica: commit steps, and report after the warm-up, and after a step with one participant fewer."""
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    held = occupy(request["gib"])  # noqa: F841  keeps the memory as long as the process lives
    occupied.wait()  # so that no replica's short timeout expires while another replica still allocates memory
    setting = SETTINGS[request["setting"]]
    group = ProcessGroupGloo(timeout=timedelta(seconds=setting["group"])) if setting["group"] else ProcessGroupGloo()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    beats = {"heartbeat_interval": timedelta(seconds=setting["heartbeat"])} if setting["heartbeat"] else {}
    manager = Manager(
        pg=group, load_state_dict=lambda state: None, state_dict=dict, min_replica_size=1, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"replica-{me}", hostname="127.0.0.1", **beats,
    )  # fmt: skip
    whole, was_reported = 0, False
    while True:  # continues after the report, because other survivors may need another step
        manager.start_quorum()
        manager.allreduce(torch.ones(request["elements"])).wait()
        if not manager.should_commit():
            continue
        if manager.num_participants() == request["workers"]:
            whole += 1
            if whole == request["warm_up"]:
                print(file=report)
        elif whole >= request["warm_up"] and not was_reported:
            was_reported = True
            print(json.dumps({"reduce": time.monotonic()}), file=report)


def recovery(request: dict[str, Any]) -> float:
    """Measure one recovery; return its milliseconds.  Raises RuntimeError if a replica exits unexpectedly."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = lighthouse(port, SETTINGS[request["setting"]]["lighthouse"])
    try:
        worker = partial(work, port, request, FORK.Barrier(request["workers"]))
        with forked(request["workers"], worker) as (pids, reports):
            killed, survivors = strike(pids, reports, request["victim"], request["pause"])
    finally:
        process.kill()
        process.wait()
    if min(times["reduce"] for times in survivors) < killed:
        raise RuntimeError("a replica was declared dead before one was killed")
    return 1e3 * (max(times["reduce"] for times in survivors) - killed)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the replicas' output must not mix with the answers
    import torchft  # noqa: F401

    for line in sys.stdin:
        print(recovery(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
