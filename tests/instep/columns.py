"""A worker's program without a model: decisions of all, and between them operations of some over their replicas.

    columns.py ITERATIONS FOLDER --recover ...

Replicas of two stages.  In every iteration the second stage makes operations that the first one knows nothing of, and
the first one waits for it inside their replica, where no news of a death reaches it, as in a pass of a pipeline.  A
worker writes a JSON line for every operation: what it had before, and what it got.

COLUMNS_STRIKES: a JSON list of [worker, iteration, operation, where]; there it kills itself:

    before  begun  done   before it takes part; in the middle; when it has the result, but before the barrier
    over  after           past the barrier, but nobody was told; when it goes on
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.arguments import config_from_argv
from recover_megatron.collectives.tree import TreeBackend
from recover_megatron.instep.decision import Rules
from recover_megatron.instep.faults import Orphaned, RunOver
from recover_megatron.instep.groups import exchange
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig
from recover_megatron.instep.groups.process_group import EpochGroup
from recover_megatron.instep.groups.traffic import WORLD, Mode, Traffic
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.recovery import Worker as Own
from recover_megatron.membership.io.session import connect
from recover_megatron.membership.records import Settings
from recover_megatron.network.peer_store import PeerStoreServer
from recover_megatron.workload.grid import launch_grid

ITERATIONS, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
SECRET = b"the boards' secret"
STRIKES = [tuple(strike) for strike in json.loads(os.environ["COLUMNS_STRIKES"])]


class Worker:
    def __init__(self, me: int, world: int) -> None:
        config = config_from_argv(sys.argv[3:])
        settings = Settings(config.heartbeat_interval, config.heartbeat_timeout, config.hang_timeout)
        self.grid = launch_grid(world, tensor=1, context=1, pipeline=2, inner_ranks=1)
        comm_config = CommunicationConfig(PeerStoreServer("127.0.0.1", SECRET), SECRET, torch.device("cpu"))
        self.iteration, self.operation = 0, ""
        self.recovery = Recovery(connect(settings), Own(me, me), self.grid, comm_config, no_model(self), Rules(), 0)
        self.traffic = Traffic(me)
        replica, self.stage = self.grid.place(me)
        self.mates = self.grid.replicas[replica]
        column = tuple(sorted(slots[self.stage] for slots in self.grid.replicas))
        self.column = EpochGroup(self.traffic, None, column, "column")
        self.world = EpochGroup(self.traffic, None, tuple(range(world)), WORLD)
        self.me = me

    def run(self) -> None:
        self.recovery.rendezvous.start()
        self.traffic.recovery, self.traffic.mode = self.recovery, Mode.OPEN
        for self.iteration in range(1, ITERATIONS + 1):
            self.inside("begin")
            self.recovery.sections.run("step", lambda: None)
            if self.stage:
                self.sum("first", self.column)
                self.gather("second", self.column)
            self.inside("middle")
            if self.stage:
                self.sum("third", self.column)
            self.sum("all", self.world)
        self.recovery.finish()

    def inside(self, where: str) -> None:
        """Wait for the other stage; only the end of the replica is looked at."""
        (FOLDER / f"{self.iteration}-{where}-{self.me}").touch()
        for mate in self.mates:
            while not (FOLDER / f"{self.iteration}-{where}-{mate}").exists():
                self.recovery.orphan.stay()
                time.sleep(0.001)

    def sum(self, name: str, group: EpochGroup) -> None:
        value = torch.tensor([float(2**self.me)])
        before = value.item()
        self.make(name, lambda: group.allreduce([value]))
        self.tell(name, before, value.item())

    def gather(self, name: str, group: EpochGroup) -> None:
        parts = [torch.zeros(1) for _ in range(group.size())]
        self.make(name, lambda: group.allgather([parts], [torch.tensor([float(2**self.me)])]))
        self.tell(name, float(2**self.me), sum(part.item() for part in parts))

    def make(self, name: str, operation: Any) -> None:
        self.operation = name
        self.strike("before")
        operation()
        self.strike("after")

    def tell(self, name: str, before: float, after: float) -> None:
        line = {"worker": self.me, "iteration": self.iteration, "operation": name, "had": before, "got": after}
        os.write(1, (json.dumps(line) + "\n").encode())

    def strike(self, where: str) -> None:
        if (self.me, self.iteration, self.operation, where) in STRIKES:
            os.kill(os.getpid(), signal.SIGKILL)


def no_model(worker: Worker) -> Any:
    """The hooks of a framework that trains nothing."""
    return SimpleNamespace(
        abort_replica=lambda all_heard: None,
        planned=lambda decision: None,
        last_checkpoint=lambda: "none was written",
        inject=lambda phase, iteration: None,
        describe=lambda decision: {},
        log=lambda event, **fields: None,
        version=lambda: None,
        state_of=lambda: 0,
        last_step=lambda: (0, 0),
        checkpoints=lambda: ([], []),
        digest=lambda: "",
        mirror=lambda decision, epoch_groups: {},
        iteration=lambda: worker.iteration,
    )


def watch(worker: Worker) -> None:
    """Have it strike in the middle of an operation."""
    call, performed, together = TreeBackend.call, exchange._Performed.__call__, exchange.Exchange._together

    def striking_call(self: TreeBackend, start: Any) -> Any:
        work = call(self, start)
        worker.strike("begun")
        return work

    def striking_performed(self: Any, *args: Any) -> None:
        performed(self, *args)
        worker.strike("done")

    def striking_together(self: Any, *args: Any) -> None:
        together(self, *args)
        worker.strike("over")

    TreeBackend.call = striking_call  # type: ignore[method-assign]
    exchange._Performed.__call__ = striking_performed  # type: ignore[method-assign]
    exchange.Exchange._together = striking_together  # type: ignore[method-assign]


def main() -> None:
    worker = Worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    watch(worker)
    try:
        worker.run()
    except Orphaned:
        try:
            worker.recovery.orphan.wait(position=None, ready=False)
        except RunOver as over:
            sys.exit(over.code)


assert dist.is_available()
main()
