"""Measure the phases of forming a replica from orphans, and the speed of a state transfer.

    python benchmarks/bench_regroup.py --models toy small medium --runs 2
    python benchmarks/bench_regroup.py --transfer
    python benchmarks/bench_regroup.py --groups

Twelve workers train with TP 2, PP 2, DP 3.  Three workers of different replicas and positions are killed one after the
other, by real SIGKILLs in a backward pass (--recover-inject).  The first kill leaves three spares.  The second and the
third kill are measured: each time the orphans and the spares form a new replica.  Phases in ms, in chronological order:

    detect      from the kill (when the dying worker has written its last line) to the coordinator's event
    rendezvous  until the survivors of the step have the plan of the next epoch
    step        until the current step is committed: the lost microbatches are run again, and reduced
    boundary    until the plan that places the new replica
    groups      until the slowest worker of the new replica has its process groups
    state       until the slowest worker of the new replica has its state
    first step  from the plan that places the new replica until its first step is committed, less groups and state
    total       from the kill to the end of that step

    unwind      from the break of a replica until its slowest orphan has left the training; runs in parallel

The times are from the coordinator, and from the log of each worker that takes a place.  "state" includes the wait for
the donors, which compute until they reach the same boundary.

--transfer measures MiB/s, and the processor time of both ends, of sending 256 MiB from one process to another: as a
state (collectives/state/receiver.py: chunks, checksums, several connections), by gloo's send and recv, and by a plain
socket.  States and gloo's messages are received into memory in use, and into new memory.  Then the same state is
fetched from two holders in separate processes.  Finally, the slowdown of a holder is measured: the time of its matrix
products while it sends its state repeatedly, relative to the time without sending.

--groups measures the time in ms until the gloo groups of two workers are renewed: by this package, which renews all
groups together (collectives/gloo/abortable_groups.py), and by torch's experimental reconfiguration, group by group.
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import (
    FORK,
    MODELS,
    RECOVER,
    REPOSITORY,
    command_line,
    head,
    load_average,
    reported,
    row,
    store,
    train,
    write,
)
from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.gloo.abortable_groups import GlooGroups
from recover_megatron.collectives.state.holder import Offer, Offers
from recover_megatron.collectives.state.receiver import Receiver, Source
from recover_megatron.collectives.state.trees import new_memory
from recover_megatron.network.peer_store import PeerStoreServer, open_stream
from recover_megatron.run_log.events import EVENTS_FILE, Event, read_events
from recover_megatron.workload.grid import launch_grid
from tests.harness.forkserver import ForkServer, Run

SCRIPT = str(REPOSITORY / "pretrain_gpt_recover.py")
WORKERS, SHAPE = 12, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
GRID = launch_grid(WORKERS, tensor=2, context=1, pipeline=2, inner_ranks=1)
KILLS = [(GRID.replicas[0][1], 2), (GRID.replicas[1][2], 4), (GRID.replicas[2][0], 6)]
"""(worker, iteration) of each kill.  Each victim is in a complete replica; a spare can replace the later victims."""
ITERATIONS = 7
PHASES = ("detect", "rendezvous", "step", "boundary", "groups", "state", "first step", "total", "unwind")
TAKES = re.compile(r"takes position \d+ of replica (\d+) from iteration (\d+) on: "
                   r"groups ([\d.]+) s, state ([\d.]+) s, (\d+) bytes")  # fmt: skip
LEAVES = re.compile(r"left the training ([\d.]+) s after")


def one_run(server: ForkServer, folder: Path, name: str, timeout: float) -> list[dict[str, float]]:
    """Train once; return the phases of each measured kill."""
    model = replace(MODELS[name], global_batch=12 * MODELS[name].micro_batch)
    spec = ",".join(f"{worker}@{iteration}:backward" for worker, iteration in KILLS)
    flags = [*model.argv, *SHAPE.split(), *RECOVER, "--recover-inject", spec]
    run = train(
        server, folder, WORKERS, flags, iterations=ITERATIONS, killed=dict(KILLS), script=SCRIPT, timeout=timeout
    )
    events = list(read_events(folder / "events-0.jsonl"))
    placing = [event for event in read_events(folder / EVENTS_FILE) if event["event"] == "plan"]
    return [recombination(run, events, placing, kill) for kill in KILLS[1:]]


def recombination(run: Run, events: list[Event], placing: list[Event], kill: tuple[int, int]) -> dict[str, float]:
    """Return the phases of one kill in milliseconds, and the bytes that its new replica received."""
    victim, iteration = kill
    struck = run.logs[victim].stat().st_mtime
    at = next(n for n, event in enumerate(events) if event["event"] == "fault" and event.get("worker") == victim)
    fault, after = events[at]["time"], iter(events[at:])
    plan = next(event["time"] for event in after if event["event"] == "plan")
    committed = next(event["time"] for event in after if event["event"] == "commit")
    took = [found for log in run.logs for found in TAKES.finditer(log.read_text())]
    took = [found for found in took if int(found[2]) == iteration + 1]
    assert len(took) == GRID.size, f"{len(took)} workers took places after iteration {iteration}"
    # These workers were placed by the last plan with a fresh replica before that iteration.
    epoch = [e["epoch"] for e in placing if e["fresh"] and e["iteration"] == iteration + 1][-1]
    placed = next(event["time"] for event in events if event["event"] == "plan" and event["epoch"] == epoch)
    first = next(event["time"] for event in events if event["event"] == "commit" and event["time"] > placed)
    groups, state = (1e3 * max(float(found[n]) for found in took) for n in (3, 4))
    left = [found for log in run.logs for found in LEAVES.finditer(log.read_text())]
    return {
        "detect": 1e3 * (fault - struck),
        "rendezvous": 1e3 * (plan - fault),
        "step": 1e3 * (committed - plan),
        "boundary": 1e3 * (placed - committed),
        "groups": groups,
        "state": state,
        "first step": 1e3 * (first - placed) - groups - state,
        "total": 1e3 * (first - struck),
        "unwind": 1e3 * max(float(found[1]) for found in left),
        "bytes": sum(int(found[5]) for found in took),
    }


def regroup(options: Any) -> None:
    """Measure the forming of replicas, and print a row for each model."""
    rows: dict[str, list[dict[str, float]]] = {}
    head("model", "parameters:", "MiB moved:", *(f"{phase}:" for phase in PHASES))
    with ForkServer() as server:
        for name in options.models:
            rows[name] = []
            for _ in range(options.runs):
                with tempfile.TemporaryDirectory() as folder:
                    rows[name] += one_run(server, Path(folder), name, options.timeout)
            values = {phase: [item[phase] for item in rows[name]] for phase in (*PHASES, "bytes")}
            cells = [f"{statistics.median(values[phase]):.0f} ({max(values[phase]):.0f})" for phase in PHASES]
            moved = statistics.median(values["bytes"]) / 2**20
            size = MODELS[name].parameters / 1e6
            row(name, f"{size:.2f} M", f"{moved:.1f}", *cells)
    print(f"\nmilliseconds, median (maximum) of {2 * options.runs} kills each; {load_average()}")
    write(options, rows)


# ---- speed of a state transfer

SIZE = 256 << 20
TENSOR = 4 << 20
MESSAGE = 8 << 20
ROUNDS = 5
WAYS = ("state", "state, into new memory", "gloo", "gloo, into new memory", "socket")
PRODUCTS = 40
"""Number of matrix products per measurement."""


def tensors(seed: int) -> dict[str, Any]:
    """Return a random state of ``SIZE`` bytes, as tensors of ``TENSOR`` bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return {"column": [torch.randn(TENSOR // 4) for _ in range(SIZE // TENSOR)]}


class Holder:
    """Holder of a state, which it offers to receivers in each round."""

    def __init__(self, shared: Any, number: int) -> None:
        self._peer_store = PeerStoreServer("127.0.0.1", SECRET)
        self._offers = Offers(self._peer_store.streams)
        self._tree = tensors(1)
        shared.set(f"holder {number}", self._peer_store.address)

    def give(self, key: str) -> Any:
        return self._offers.put(key, Offer(self._tree, SIZE // TENSOR))


SECRET = b"of the benchmark"


def fetch(addresses: list[str], key: str, place: Any) -> Any:
    """Fetch the state offered as ``key`` from the holders at ``addresses``; ``place`` returns the memory to fill."""

    def source(number: int, address: str) -> Source:
        return Source(number, lambda: open_stream(address, SECRET, f"state/{key}"))

    sources = [source(number, address) for number, address in enumerate(addresses)]
    receiver = Receiver(sources, place, stay=lambda: None, awaited=lambda: None)
    return receiver.fetch(lambda tree: len(tree["column"]))[0]


def ways(me: int, shared: Any) -> dict[str, Callable[[int], Any]]:
    """Return method -> function to time in process ``me`` (0 sends, 1 receives).

    Each function gets the number of the round.
    """
    groups = GlooGroups(me, {"pair": range(2)}, shared, CancelToken(1), ring="state")
    pair = groups.backends["pair"]
    holder = Holder(shared, 0) if me == 0 else None
    own = tensors(2)
    whole = torch.ones(SIZE, dtype=torch.uint8)
    if me == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            shared.set("socket", str(server.getsockname()[1]))
            sock = server.accept()[0]
    else:
        sock = socket.create_connection(("127.0.0.1", int(shared.get("socket"))))

    def by_gloo(into: Any) -> None:
        for chunk in into.split(MESSAGE):
            if me == 0:
                pair.send([chunk], 1, 0).wait()
            else:
                pair.recv([chunk], 0, 0).wait()

    def by_socket(number: int) -> None:
        for chunk in whole.split(MESSAGE):
            room, got = memoryview(chunk.numpy()), 0
            if me == 0:
                sock.sendall(room)
            while me == 1 and got < len(room):
                got += sock.recv_into(room[got:])

    def by_state(key: str, place: Any) -> None:
        if holder is not None:
            holder.give(key).wait(lambda: None)
        else:
            fetch([shared.get("holder 0").decode()], key, place)

    calls: tuple[Callable[[int], Any], ...] = (
        lambda number: by_state(f"in use {number}", lambda path, shape, dtype: own["column"][path[1]]),
        lambda number: by_state(f"new {number}", new_memory),
        lambda number: by_gloo(whole),
        lambda number: by_gloo(torch.empty(SIZE, dtype=torch.uint8) if me else whole),
        by_socket,
    )
    return dict(zip(WAYS, calls, strict=True))


def one_end(port: int, barrier: Any, me: int, report: TextIO) -> None:
    """Run one of the two processes of --transfer: time all methods in turns, so that other load slows all equally."""
    ways_here = ways(me, dist.TCPStore("127.0.0.1", port, is_master=False))
    for number in range(ROUNDS + 1):
        for name, go in ways_here.items():
            barrier.wait()
            started, used = time.perf_counter(), time.process_time()
            go(number)
            print(json.dumps([name, time.perf_counter() - started, time.process_time() - used]), file=report)
    barrier.wait()


def training_end(port: int, barrier: Any, me: int, report: TextIO) -> None:
    """Run process 0, which holds a state and multiplies matrices, or process 1, which fetches it in odd rounds."""
    shared = dist.TCPStore("127.0.0.1", port, is_master=False)
    holder = Holder(shared, 0) if me == 0 else None
    own, matrix = tensors(2), torch.randn(512, 512)
    for number in range(2 * ROUNDS + 2):
        beside = number % 2 == 1
        if holder is not None:
            holder.give(f"beside {number}")
        barrier.wait()
        started = time.perf_counter()
        if holder is not None:
            for _ in range(PRODUCTS):
                matrix @ matrix
            print(json.dumps([beside, time.perf_counter() - started]), file=report)
            shared.set(f"over {number}", "yes")
        elif beside:
            address = shared.get("holder 0").decode()
            while not shared.check([f"over {number}"]):
                fetch([address], f"beside {number}", lambda path, shape, dtype: own["column"][path[1]])
    barrier.wait()


def holding_end(port: int, barrier: Any, me: int, report: TextIO) -> None:
    """Run process 0 or 1, which hold the state, or process 2, which fetches it from both holders or from one."""
    shared = dist.TCPStore("127.0.0.1", port, is_master=False)
    holder = Holder(shared, me) if me < 2 else None
    own = tensors(2)
    for number in range(ROUNDS + 1):
        for several in (True, False):
            key = f"{number} {several}"
            if holder is not None:
                holder.give(key)
            barrier.wait()
            started = time.perf_counter()
            if holder is None:
                addresses = [shared.get(f"holder {n}").decode() for n in range(1 + several)]
                fetch(addresses, key, lambda path, shape, dtype: own["column"][path[1]])
                print(json.dumps([several, time.perf_counter() - started]), file=report)
            barrier.wait()


def measured(target: Callable[[int, Any, int, TextIO], None], size: int) -> list[list[Any]]:
    """Run ``target`` in ``size`` processes; return, for each process, the objects that it reports."""
    with store() as port:
        return reported(size, partial(target, port, FORK.Barrier(size)))


def transfers() -> None:
    """Print the tables of ``--transfer``."""
    found = measured(one_end, 2)
    head("256 MiB by", "MiB/s:", "processor ms, sender:", "receiver:")
    speeds = {}
    for name in WAYS:
        by_end = [[item for item in rows if item[0] == name][1:] for rows in found]  # the first round warms up
        speeds[name] = [SIZE / 2**20 / item[1] for item in by_end[1]]
        cpu = [f"{1e3 * statistics.median(item[2] for item in rows):.0f}" for rows in by_end]
        row(name, f"{statistics.median(speeds[name]):.0f}", *cpu)
    pairs = [ours / item for ours, item in zip(speeds["state"], speeds["gloo"], strict=True)]
    print(f"\nstate / gloo, round by round: median {statistics.median(pairs):.2f}; {load_average()}")
    several = measured(holding_end, 3)[2][2:]
    for which, name in ((False, "one holder"), (True, "two holders")):
        speed = SIZE / 2**20 / statistics.median(seconds for item, seconds in several if item == which)
        print(f"{name}: {speed:.0f} MiB/s", flush=True)
    products = measured(training_end, 2)[0][2:]
    alone, beside = (statistics.median(s for item, s in products if item == which) for which in (False, True))
    print(f"the holder's matrix products take {beside / alone:.2f} times as long during a transfer; {load_average()}")


GROUPS = (1, 8)
"""Numbers of groups in a measurement."""


def grouping_end(port: int, barrier: Any, me: int, report: TextIO) -> None:
    """Run one of the two processes of --groups: renew groups by both methods, and report the seconds of each."""
    shared = dist.TCPStore("127.0.0.1", port, is_master=False)
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

    def empty(name: str) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options.enable_reconfigure = [device], True
        return dist.ProcessGroupGloo(dist.PrefixStore(name, shared), me, 2, options)

    def reconfigure(group: Any, key: str, number: int) -> None:
        shared.set(f"{key}/{me}", group.get_reconfigure_handle())
        options = dist.distributed_c10d.ReconfigureOptions()
        options.uuid, options.timeout = number, timedelta(seconds=60)
        options.handles = [shared.get(f"{key}/{member}").decode() for member in range(2)]
        group.reconfigure(options).wait()

    for many in GROUPS:
        groups = {f"{many}/{name}": empty(f"{many}/{name}") for name in range(many)}
        for number in range(1, 2 * ROUNDS + 2):
            barrier.wait()
            started, token = time.perf_counter(), CancelToken(number)
            ours = GlooGroups(me, dict.fromkeys(groups, range(2)), shared, token, ring=f"{many} groups {number}")
            print(json.dumps([many, "together", time.perf_counter() - started]), file=report)
            barrier.wait()
            ours.close()
            started = time.perf_counter()
            for name, group in groups.items():
                reconfigure(group, f"{name}/{number}", number)
            print(json.dumps([many, "reconfigured", time.perf_counter() - started]), file=report)
    barrier.wait()


def groupings() -> None:
    """Print the table of ``--groups``."""
    found = measured(grouping_end, 2)
    head("groups", "together, ms:", "reconfigured, ms:", "ratio:")
    for many in GROUPS:
        medians = []
        for way in ("together", "reconfigured"):
            ends = [[seconds for *key, seconds in rows if key == [many, way]] for rows in found]
            medians.append(1e3 * statistics.median(map(max, *(item[1:] for item in ends))))  # drops the first round
        ours, other = medians
        row(str(many), f"{ours:.1f}", f"{other:.1f}", f"{other / ours:.1f}")
    print(f"medians of {2 * ROUNDS}; {load_average()}")


def main() -> None:
    parser = command_line(__doc__, timeout=600)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["toy", "small", "medium"])
    parser.add_argument("--runs", type=int, default=2, help="runs per model; two kills are measured in each")
    parser.add_argument("--transfer", action="store_true", help="measure state transfers instead")
    parser.add_argument("--groups", action="store_true", help="measure the renewal of gloo groups instead")
    options = parser.parse_args()
    if options.transfer:
        transfers()
    elif options.groups:
        groupings()
    else:
        regroup(options)


if __name__ == "__main__":
    main()
