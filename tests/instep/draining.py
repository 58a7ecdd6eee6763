"""A script whose training has nodes drained: draining.py WHEN SCRIPT flags...

WHEN is ITERATION:NODE[,...].  Before that iteration's step, or in the middle of it with a phase behind the iteration
(ITERATION@PHASE:NODE), the first worker of the launch asks for the node to be drained, as recover-status does, and goes
on when the coordinator shows the node; what the command says goes to drain-NUMBER.txt in the log folder, with its exit
code at the end.  A number is that of the order, from 0.

The last two iterations wait until all commands have ended, or the epoch has: they look twice a second, and should not
find the run over.
"""

import os
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron.training import get_args, training

from recover_megatron.arguments import parse_addresses
from recover_megatron.instep.hooks import ProgressReports
from recover_megatron.instep.recovery import Recovery
from recover_megatron.membership.session import worker_id
from recover_megatron.membership.wire import find_secret
from recover_megatron.status.source import Watch
from tests.harness.waiting import written_lines

when, script = sys.argv.pop(1), sys.argv.pop(1)
folder = Path(sys.argv[sys.argv.index("--recover-log-dir") + 1])
orders = [order.rpartition(":")[::2] for order in when.split(",")]
given: set[int] = set()
recoveries: list[Recovery] = []
train_step, inject, begin = training.train_step, ProgressReports.inject, Recovery.__init__


def ask(number: int, node: str) -> None:
    """Start the command, and go on when the coordinator knows of the node."""
    address = os.environ["RECOVER_COORDINATOR"]
    command = [sys.executable, "-m", "recover_megatron.status", address, "drain", node]
    said = f"{shlex.join(command)} > {folder}/drain-{number}.txt 2>&1; echo $? >> {folder}/drain-{number}.txt"
    subprocess.Popen(["/bin/sh", "-c", said], start_new_session=True)
    watch = Watch(parse_addresses(address), find_secret())
    while not any(node in row.names for row in watch.look().drains):
        time.sleep(0.5)
    watch.close()


def due(place: str) -> None:
    for number, (at, node) in enumerate(orders):
        if at == place and number not in given and worker_id() == 0:
            given.add(number)
            ask(number, node)


def ended(number: int) -> bool:
    last = written_lines(folder / f"drain-{number}.txt")[-1:]
    return last != [] and last[0].isdecimal()


def step(*args: Any, **kwargs: Any) -> Any:
    due(str(get_args().curr_iteration + 1))
    while get_args().curr_iteration + 2 >= get_args().train_iters and not all(map(ended, range(len(orders)))):
        if recoveries[-1].assignment.epoch_groups.over:
            break
        time.sleep(0.05)
    return train_step(*args, **kwargs)


def inject_and_ask(self: ProgressReports, phase: str, *args: Any, **kwargs: Any) -> Any:
    if hasattr(get_args(), "curr_iteration"):
        due(f"{get_args().curr_iteration + 1}@{phase}")
    return inject(self, phase, *args, **kwargs)


def noted_init(self: Recovery, *args: Any, **kwargs: Any) -> None:
    recoveries.append(self)
    begin(self, *args, **kwargs)


step.__wrapped__ = train_step  # type: ignore[attr-defined]
training.train_step = step
Recovery.__init__ = noted_init  # type: ignore[method-assign]
ProgressReports.inject = inject_and_ask  # type: ignore[method-assign]
runpy.run_path(script, run_name="__main__")
