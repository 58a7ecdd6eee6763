"""From SIGKILL of a worker to the first completed all-reduce among the survivors, phase by phase.

    python benchmarks/bench_recovery.py --workers 4 8 --kills 30

Each kill: a real coordinator and fresh workers, forked from a process that has imported torch, all-reduce 1 MiB over
and over; one of them gets SIGKILL.  The phases, each from the end of the one before until the last survivor has done
it (0 if that was earlier: a neighbour of the dead notices by its connection, before it is told):

    detect      the coordinator has taken the worker for dead (its event log says when)
    revoke      every survivor has been told
    unwind      every survivor's all-reduce has raised EpochRevoked and its group is closed
    rendezvous  every survivor holds the plan of the next epoch
    regroup     every survivor has the group of the next epoch, ledgers exchanged
    reduce      every survivor has the sum over the survivors

Prints a table of medians and maxima in milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.megatron_runs import command_line, coordinator, forked, head, lines, row, store, write
from recover_megatron.collectives.epoch import EpochRevoked, SessionEpoch
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.membership.session import Session
from recover_megatron.membership.wire import Secret

ELEMENTS = (1 << 20) // 4
WARM_UP = 5
"""All-reduces of the full group before a worker is killed."""
PHASES = ("detect", "revoke", "unwind", "rendezvous", "regroup", "reduce")


def work(address: tuple[str, int], secret: bytes, store_port: int, me: int, report: TextIO) -> None:
    """One worker: reduce until the epoch is revoked, recover, reduce once more, report the times."""
    torch.set_num_threads(1)
    times: dict[str, float] = {}

    def note(what: str) -> None:
        times.setdefault(what, time.monotonic())

    session = Session.connect(
        [address], me, Secret(secret), on_revoke=lambda epoch, reason: note("revoke") if times.get("steady") else None
    )
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


def one_kill(workers: int, choose: random.Random) -> dict[str, float]:
    """The phases of one recovery, in milliseconds."""
    secret = secrets.token_hex(16)
    with ExitStack() as stack:
        events = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "events.jsonl"
        process, port = stack.enter_context(coordinator(workers, events, secret))
        store_port = stack.enter_context(store())
        worker = partial(work, ("127.0.0.1", port), secret.encode(), store_port)
        pids, reports = stack.enter_context(forked(workers, worker))
        for report in reports:
            report.readline()
        time.sleep(choose.random() * 0.05)  # anywhere in an all-reduce
        victim = choose.randrange(workers)
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        survivors = [json.loads(report.readline()) for me, report in enumerate(reports) if me != victim]
        process.wait(30)
        ends = {phase: max(times[phase] for times in survivors) for phase in PHASES[1:]}
        # When the coordinator took the victim for dead, on the clock that all processes of the machine share.
        faults = (e for e in lines(events) if e["event"] == "fault" and e.get("worker") == victim)
        ends["detect"] = next(faults)["mono"]
    result, before = {}, killed
    for phase in PHASES:
        end = max(before, ends[phase])
        result[phase] = 1e3 * (end - before)
        before = end
    result["total"] = 1e3 * (before - killed)
    return result


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    choose, rows = random.Random(options.seed), []
    head("workers", *PHASES, "total")
    for workers in options.workers:
        kills = [one_kill(workers, choose) for _ in range(options.kills)]
        rows += [{"workers": workers, **kill} for kill in kills]
        cells = []
        for phase in (*PHASES, "total"):
            values = [kill[phase] for kill in kills]
            cells.append(f"{statistics.median(values):.1f} ({max(values):.1f})")
        row(workers, *cells)
    print(f"\nmilliseconds, median (maximum) of {options.kills} kills; {os.cpu_count()} cores; 1 MiB per all-reduce")
    write(options, rows)


if __name__ == "__main__":
    main()
