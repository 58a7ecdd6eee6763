"""What it takes to put a replica together again from orphans, phase by phase, and how fast a state travels.

    python benchmarks/bench_regroup.py --models toy small medium --runs 2
    python benchmarks/bench_regroup.py --transfer

Twelve workers train with TP 2, PP 2, DP 3.  The first kill leaves three spares; the second and the third (another
position of another replica each, by --recover-inject: real SIGKILLs in a backward pass) are measured: each time the
orphans and the spares make a new replica.  In ms, in the order of time but for *unwind*, which goes on beside:

    detect      from the kill (when the dying worker has written its last line) to the coordinator's event
    rendezvous  until the survivors of the step have the plan of the next epoch
    step        until the step under way is committed: the lost microbatches are run again, and reduced
    boundary    until the plan that places the new replica
    groups      its groups are made anew (the slowest of its workers)
    state       its workers get their state, or find that they hold it (the slowest)
    first step  until the first step of the new replica is committed, less groups and state
    total       from the kill to that

    unwind      from when an orphan's replica is known to be broken until it is out of the training (the run's slowest)

The times are the coordinator's, and what each worker that takes a place says in its log.  *state* includes that the
donors begin to send when they come to the same place: they compute until then.

--transfer: 256 MiB from one process to another, by instep/transfer.py, by gloo alone (send and recv of the same
messages, into memory that is in use, and into new memory, as a transfer's is), and by a plain socket; MiB/s of wall
time, and the processor time that each end took.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.megatron_runs import COMMON, MODELS, RECOVER, load_average  # noqa: E402
from recover_megatron.instep.grid import launch_grid  # noqa: E402
from recover_megatron.run_log.events import EVENTS_FILE, Event, read_events  # noqa: E402
from tests.harness.forkserver import ForkServer, Run  # noqa: E402

SCRIPT = str(REPOSITORY / "pretrain_gpt_recover.py")
WORKERS, SHAPE = 12, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
GRID = launch_grid(WORKERS, tensor=2, context=1, pipeline=2, inner_ranks=1)
KILLS = [(GRID.replicas[0][1], 2), (GRID.replicas[1][2], 4), (GRID.replicas[2][0], 6)]
"""(worker, iteration): each of a replica that is whole then, and in a position of which there is a spare."""
ITERATIONS = 7
PHASES = ("detect", "rendezvous", "step", "boundary", "groups", "state", "first step", "total", "unwind")
TAKES = re.compile(r"takes position \d+ of replica (\d+) from iteration (\d+) on: "
                   r"groups ([\d.]+) s, state ([\d.]+) s, (\d+) bytes")  # fmt: skip
LEAVES = re.compile(r"out of the training ([\d.]+) s after")


def one_run(server: ForkServer, folder: Path, name: str, timeout: float) -> list[dict[str, float]]:
    """Its recombinations."""
    model = replace(MODELS[name], global_batch=12 * MODELS[name].micro_batch)
    spec = ",".join(f"{worker}@{iteration}:backward" for worker, iteration in KILLS)
    argv = [SCRIPT, *COMMON, *model.argv, *SHAPE.split(), *RECOVER, "--recover-log-dir", str(folder)]
    argv += ["--train-iters", str(ITERATIONS), "--log-interval", "100", "--recover-inject", spec]
    run = server.run(WORKERS, argv, folder, timeout=timeout)
    if any(code != (-9 if worker in dict(KILLS) else 0) for worker, code in enumerate(run.codes)):
        raise RuntimeError(f"{spec}: {run.tail(40)}")
    told = list(read_events(folder / "events-0.jsonl"))
    placing = [event for event in read_events(folder / EVENTS_FILE) if event["event"] == "plan"]
    return [recombination(run, told, placing, kill) for kill in KILLS[1:]]


def recombination(run: Run, told: list[Event], placing: list[Event], kill: tuple[int, int]) -> dict[str, float]:
    """One kill: its phases in milliseconds, and the bytes that its new replica got."""
    victim, iteration = kill
    struck = run.logs[victim].stat().st_mtime
    at = next(n for n, event in enumerate(told) if event["event"] == "fault" and event.get("worker") == victim)
    fault, after = told[at]["time"], iter(told[at:])
    plan = next(event["time"] for event in after if event["event"] == "plan")
    committed = next(event["time"] for event in after if event["event"] == "commit")
    took = [found for log in run.logs for found in TAKES.finditer(log.read_text())]
    took = [found for found in took if int(found[2]) == iteration + 1]
    assert len(took) == GRID.size, f"{len(took)} workers took places after iteration {iteration}"
    # The plan that placed them is the last one that put a replica together before that iteration.
    epoch = [e["epoch"] for e in placing if e["fresh"] and e["iteration"] == iteration + 1][-1]
    placed = next(event["time"] for event in told if event["event"] == "plan" and event["epoch"] == epoch)
    first = next(event["time"] for event in told if event["event"] == "commit" and event["time"] > placed)
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
    """A row for each model."""
    rows: dict[str, list[dict[str, float]]] = {}
    print(f"| model | parameters | MiB moved | {' | '.join(PHASES)} |\n|---{'|--:' * (len(PHASES) + 2)}|", flush=True)
    with ForkServer() as server:
        for name in options.models:
            rows[name] = []
            for _ in range(options.runs):
                with tempfile.TemporaryDirectory() as folder:
                    rows[name] += one_run(server, Path(folder), name, options.timeout)
            values = {phase: [row[phase] for row in rows[name]] for phase in (*PHASES, "bytes")}
            cells = [f"{statistics.median(values[phase]):.0f} ({max(values[phase]):.0f})" for phase in PHASES]
            moved = statistics.median(values["bytes"]) / 2**20
            size = MODELS[name].parameters / 1e6
            print(f"| {name} | {size:.2f} M | {moved:.1f} | {' | '.join(cells)} |", flush=True)
    print(f"\nmilliseconds, median (maximum) of {2 * options.runs} kills each; {load_average()}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


# ---- how fast a state travels

SIZE = 256 << 20
TENSOR = 4 << 20
ROUNDS = 3
WAYS = ("transfer.py", "gloo", "gloo, into new memory", "socket")


def ways(me: int) -> dict[str, Callable[[], Any]]:
    """What to time at end ``me`` (0 sends, 1 receives), by name."""
    import torch
    import torch.distributed as dist

    from recover_megatron.collectives.epoch import CancelToken
    from recover_megatron.collectives.gloo.abort import GlooBackend
    from recover_megatron.instep import transfer

    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=me == 0, wait_for_workers=False)
    pair = GlooBackend(me, 2, store, CancelToken(1), ring="state")
    tree = [torch.randn(TENSOR // 4) for _ in range(SIZE // TENSOR)] if me == 0 else []
    chunk = torch.ones(transfer.CHUNK, dtype=torch.uint8)
    if me == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("socket", str(server.getsockname()[1]))
            sock = server.accept()[0]
    else:
        sock = socket.create_connection(("127.0.0.1", int(store.get("socket"))))
    room = memoryview(chunk.numpy())

    def by_gloo() -> None:
        for _ in range(SIZE // transfer.CHUNK):
            (transfer._send if me == 0 else transfer._receive)(pair, 1 - me, chunk)

    def by_gloo_into_new_memory() -> None:
        room = torch.empty(SIZE if me else 0, dtype=torch.uint8)
        for number in range(SIZE // transfer.CHUNK):
            if me == 0:
                transfer._send(pair, 1, chunk)
            else:
                transfer._receive(pair, 0, room[number * transfer.CHUNK :][: transfer.CHUNK])

    def by_socket() -> None:
        for _ in range(SIZE // transfer.CHUNK):
            if me == 0:
                sock.sendall(room)
            else:
                got = 0
                while got < len(room):
                    got += sock.recv_into(room[got:])

    def by_transfer() -> Any:
        return transfer.send(tree, pair, 1) if me == 0 else transfer.receive(pair, 0)

    return dict(zip(WAYS, (by_transfer, by_gloo, by_gloo_into_new_memory, by_socket), strict=True))


def one_end(me: int, barrier: Any, results: Any) -> None:
    """Time each way in turn, so that a busy machine slows all alike."""
    ways_here = ways(me)
    for _ in range(ROUNDS + 1):
        for name, go in ways_here.items():
            barrier.wait()
            started, used = time.perf_counter(), time.process_time()
            go()
            results.put((name, me, time.perf_counter() - started, time.process_time() - used))
    barrier.wait()


def transfers() -> None:
    """The table of ``--transfer``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    ends = [context.Process(target=one_end, args=(me, barrier, results)) for me in range(2)]
    for end in ends:
        end.start()
    found = [results.get() for _ in range(2 * (ROUNDS + 1) * len(WAYS))]
    for end in ends:
        end.join()
    print("| 256 MiB by | MiB/s | processor ms, sender | receiver |\n|---|--:|--:|--:|")
    for name in WAYS:
        by_end = [[row for row in found if row[:2] == (name, me)][1:] for me in range(2)]  # the first warms up
        speed = SIZE / 2**20 / statistics.median(row[2] for row in by_end[1])
        cpu = [f"{1e3 * statistics.median(row[3] for row in rows):.0f}" for rows in by_end]
        print(f"| {name} | {speed:.0f} | {' | '.join(cpu)} |")
    print(f"\nmedian of {ROUNDS}; {load_average()}")


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["toy", "small", "medium"])
    parser.add_argument("--runs", type=int, default=2, help="of each model; two recombinations each")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run")
    parser.add_argument("--transfer", action="store_true", help="measure how a state travels, instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.transfer:
        transfers()
    else:
        regroup(options)


if __name__ == "__main__":
    main()
