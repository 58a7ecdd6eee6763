"""Measure the time, by phase, from SIGKILL of a worker to the first complete all-reduce of the survivors.

    python benchmarks/bench_recovery.py --workers 4 8 --kills 30
    python benchmarks/bench_recovery.py --workers 4 --resident 0 1 3 --kills 10 --beside gloo torchft

For each kill, new workers are forked from a process that has imported torch, and connect to a real coordinator.  They
all-reduce 1 MiB repeatedly, until one of them gets SIGKILL.  --resident adds GiB of touched memory to each worker,
which the kernel frees before it closes the worker's connections and makes its pidfd readable.  --tell chooses how the
launcher (a node agent, like recover-run) notices the death that it reports:

    pidfd       by the worker's pidfd; the coordinator may have seen the closed connection earlier
    mutex       by a robust mutex that a thread of the worker held until its end (network/death_notice.py), or by the
                pidfd

Each phase lasts from the end of the previous phase until the last survivor has finished it.  A phase takes 0 if it
ended before the previous phase: a neighbour of the dead worker may notice the death before the revoke arrives.

    detect      the coordinator has declared the worker dead (time from its event log)
    revoke      every survivor has received the revoke
    unwind      every survivor's all-reduce has raised EpochRevoked and its group is closed
    rendezvous  every survivor has the plan of the next epoch
    regroup     every survivor has the group of the next epoch, and ledgers are exchanged
    reduce      every survivor has the sum over the survivors

--beside measures the same death with other libraries, in turns, in the first --beside-kills rounds:

    gloo        torch's gloo, reconfigured among the survivors (beside_gloo.py), with each --tell; the phase "detect"
                ends when the launcher has noticed the death
    torchft     a torchft that is installed in build/, with three settings: default timeouts, the timeouts of torchft's
                example, and tuned ones (beside_torchft.py)

Prints a table of medians and maxima in milliseconds.  "ratio" is the median total over recover_megatron's median total
with the last --tell.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import select
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import beside_gloo
from benchmarks.beside_torchft import SETTINGS, Torchft
from benchmarks.megatron_runs import (
    command_line,
    coordinator,
    enough_memory,
    forked,
    head,
    lines,
    load_average,
    occupy,
    reported,
    row,
    store,
    strike,
    write,
)
from recover_megatron.collectives.epoch import EpochRevoked, SessionEpoch
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.launch.workers.dying import ending
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import WorkerId
from recover_megatron.membership.sides.node_agent import NodeAgent
from recover_megatron.membership.wire import Secret
from recover_megatron.network import death_notice

ELEMENTS = (1 << 20) // 4
WARM_UP = 5
"""Number of all-reduces of all workers before one worker is killed."""
PHASES = ("detect", "revoke", "unwind", "rendezvous", "regroup", "reduce")
TELLS = ("pidfd", "mutex")
NODE = "node"
OTHERS_GIB = 0.5
"""Maximum memory of a worker in addition to --resident, in GiB."""


def work(address: tuple[str, int], secret: bytes, store_port: int, me: int, report: TextIO) -> None:
    """Run one worker: all-reduce until the epoch is revoked, recover, all-reduce once more, and report the times."""
    torch.set_num_threads(1)
    times: dict[str, float] = {}

    def note(what: str) -> None:
        times.setdefault(what, time.monotonic())

    session = Session.connect(
        [address], me, Secret(secret), node_agent=NODE,
        on_revoke=lambda epoch, reason: note("revoke") if times.get("steady") else None,
    )  # fmt: skip
    key_value = torch.distributed.TCPStore("127.0.0.1", store_port, is_master=False)

    def join() -> Group:
        plan = session.join({})
        if times.get("steady"):
            note("rendezvous")
        return open_group(SessionEpoch(session, plan, me, sorted(plan.members)), key_value, name="bench", secret=secret)

    group = join()
    reduced = 0
    while True:
        bucket = Bucket(torch.ones(ELEMENTS))
        try:
            group.all_reduce(bucket).wait()
        except EpochRevoked:
            group.close()
            note("unwind")
            group = join()
            group.pull([bucket])
            note("regroup")
            group.all_reduce(bucket).wait()
            note("reduce")
            break
        reduced += 1
        if reduced == WARM_UP:
            note("steady")
            print(file=report)
    print(json.dumps(times), file=report)
    session.leave()


class Launcher:
    """Launcher that reports the deaths of its workers, as recover-run does."""

    def __init__(self, workers: int, tell: str) -> None:
        self._watches = [watch for _ in range(workers) if tell == "mutex" and (watch := death_notice.DeathWatch.make())]

    def hold(self, me: int) -> None:
        """With --tell mutex, lock the mutex by which the launcher notices worker ``me``'s death.  Called by workers."""
        if self._watches and not death_notice.hold(self._watches[me].variables):
            raise RuntimeError("this worker cannot share a mutex with its launcher")

    def begin(self, pids: Sequence[int], tell: Callable[[int, str], object]) -> None:
        """Start to watch the workers: call ``tell(worker, reason)`` for every death."""
        for worker, (watch, pid) in enumerate(zip(self._watches, pids, strict=False)):
            watch.begin(partial(self._dying, worker, pid, tell))
        threading.Thread(target=self._wait_gone, args=(pids, tell), daemon=True).start()

    @staticmethod
    def _dying(worker: int, pid: int, tell: Callable[[int, str], object]) -> None:
        how = ending(pid).how
        os.kill(pid, signal.SIGKILL)  # recover-run kills the process group, too
        tell(worker, how)

    @staticmethod
    def _wait_gone(pids: Sequence[int], tell: Callable[[int, str], object]) -> None:
        handles = {os.pidfd_open(pid): worker for worker, pid in enumerate(pids)}
        while handles:
            for handle in select.select(list(handles), [], [])[0]:
                tell(handles.pop(handle), "SIGKILL")

    def of_no_interest(self, *told: object) -> None:
        """Ignore messages of the coordinator that this benchmark does not need."""

    evict = epoch_wanted = epoch_formed = noted = draining = said = may_host = of_no_interest


def prepared(launcher: Launcher, gib: float, worker: Callable[[int, TextIO], object], me: int, report: TextIO) -> None:
    """Run ``worker`` with ``gib`` GiB of additional memory, and make ``launcher`` notice its death."""
    launcher.hold(me)
    held = occupy(gib)  # noqa: F841  keeps the memory as long as the process lives
    worker(me, report)


def our_recovery(workers: int, gib: float, tell: str, victim: int, pause: float) -> dict[str, float]:
    """Measure one recovery with recover_megatron; return the milliseconds of its phases."""
    secret, launcher = secrets.token_hex(16), Launcher(workers, tell)
    with ExitStack() as stack:
        events = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "events.jsonl"
        process, port = stack.enter_context(coordinator(workers, events, secret))
        worker = partial(work, ("127.0.0.1", port), secret.encode(), stack.enter_context(store()))
        pids, reports = stack.enter_context(forked(workers, partial(prepared, launcher, gib, worker)))
        agent = NodeAgent([("127.0.0.1", port)], NODE, Secret(secret.encode()), launcher)
        agent.wait_led(60)
        launcher.begin(pids, lambda worker, how: agent.ended(WorkerId(worker), how))
        killed, survivors = strike(pids, reports, victim, pause)
        process.wait(30)
        # "mono" is the monotonic clock, which all processes of a host share.
        faults = (e for e in lines(events) if e["event"] == "fault" and e.get("worker") == victim)
        return phases(killed, {"detect": next(faults)["mono"]}, survivors)


def gloo_recovery(workers: int, gib: float, tell: str, victim: int, pause: float) -> dict[str, float]:
    """Measure one recovery with torch's gloo; return the milliseconds of its phases."""
    launcher = Launcher(workers, tell)
    with ExitStack() as stack:
        port = stack.enter_context(store())
        worker = partial(beside_gloo.work, port, workers, ELEMENTS, WARM_UP)
        pids, reports = stack.enter_context(forked(workers, partial(prepared, launcher, gib, worker)))
        teller = beside_gloo.Teller(port)
        launcher.begin(pids, teller.tell)
        killed, survivors = strike(pids, reports, victim, pause)
        return phases(killed, teller.told, survivors)


def phases(killed: float, known: Mapping[str, float], survivors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return phase -> milliseconds, and their sum as "total".

    ``killed``: time of the kill.  ``known``, ``survivors``: phase -> time at which it ended, in seconds.  A phase
    without a reported end is left out.
    """
    result, before = dict[str, float](), killed
    for phase in PHASES:
        ends = [times[phase] for times in [known, *survivors] if phase in times]
        if ends:
            end = max(before, *ends)
            result[phase] = 1e3 * (end - before)
            before = end
    return result | {"total": 1e3 * (before - killed)}


def in_a_child(recovery: Callable[..., dict[str, float]], **case: Any) -> dict[str, float]:
    """Measure one recovery in a child process, so that this process starts no threads and can always fork."""
    ((found,),) = reported(1, lambda _, report: print(json.dumps(recovery(**case)), file=report))
    return found


def summary(kills: Iterable[Mapping[str, Any]], base: str) -> list[list[object]]:
    """Return the rows of the table: medians and maxima of each method, and its ratio to the method ``base``."""
    by_way: dict[tuple[int, float, str], list[Mapping[str, Any]]] = {}
    for kill in kills:
        by_way.setdefault((kill["workers"], kill["GiB"], kill["way"]), []).append(kill)
    rows: list[list[object]] = []
    for (workers, gib, way), item in by_way.items():
        of = {name: [kill[name] for kill in item if name in kill] for name in (*PHASES, "total")}
        cells = [f"{statistics.median(ms):.1f} ({max(ms):.1f})" if ms else "" for ms in of.values()]
        usual = statistics.median(kill["total"] for kill in by_way[workers, gib, base])
        rows.append([workers, f"{gib:g}", way, len(item), *cells, f"{statistics.median(of['total']) / usual:.2f}"])
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--resident", type=float, nargs="+", default=[0], help="more GiB per worker", metavar="GIB")
    parser.add_argument("--tell", choices=TELLS, nargs="+", default=list(TELLS))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--beside", choices=("gloo", "torchft"), nargs="+", default=[])
    parser.add_argument("--beside-kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    needed = max(options.workers) * (max(options.resident) + OTHERS_GIB)
    if not enough_memory(needed):
        parser.error(f"the workers need {needed:g} GiB of memory, but less is available on this machine")
    if "gloo" in options.beside and beside_gloo.lacking():
        parser.error(beside_gloo.lacking())
    choose, found = random.Random(options.seed), list[dict[str, Any]]()
    with ExitStack() as stack:
        ways = {tell: partial(in_a_child, our_recovery, tell=tell) for tell in options.tell}
        others = {}
        if "gloo" in options.beside:
            others = {f"gloo, {tell}": partial(in_a_child, gloo_recovery, tell=tell) for tell in options.tell}
        if "torchft" in options.beside:
            item = partial(stack.enter_context(Torchft()).recovery, elements=ELEMENTS, warm_up=WARM_UP)
            others |= {f"torchft, {setting}": partial(item, setting=setting) for setting in SETTINGS}
        head("workers", "GiB each", "way", "kills", *PHASES, "total", "ratio")
        for workers, gib in ((workers, gib) for workers in options.workers for gib in options.resident):
            kills = list[dict[str, Any]]()
            for number in range(options.kills):
                # The kill comes at a random moment of an all-reduce, and at the same moment with all methods.
                case = {"victim": choose.randrange(workers), "pause": choose.random() * 0.05}
                for way, recovery in (ways | others if number < options.beside_kills else ways).items():
                    took = recovery(workers=workers, gib=gib, **case)
                    kills.append({"workers": workers, "GiB": gib, "way": way, **took})
            for cells in summary(kills, options.tell[-1]):
                row(*cells)
            found += kills
    print(f"\nmilliseconds, median (maximum); {load_average()}; 1 MiB per all-reduce; torch {torch.__version__}")
    write(options, found)


if __name__ == "__main__":
    main()
