"""The log folders of a run that never was, with all that a report may find in one."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path

from recover_megatron.run_log.events import Event
from recover_megatron.run_log.steps import StepRecord

REPLICAS, M, SIZE = 4, 16, 2
T0 = 1_700_000_000.0
DEATHS = {20: (5, 2), 33: (1, 0)}
"""Iteration -> the worker that dies in it, and its replica; two workers to a replica."""


def shares(alive: list[int]) -> dict[int, list[int]]:
    return {replica: list(range(place, M, len(alive))) for place, replica in enumerate(alive)}


def steps(iterations: int = 50, deaths: dict[int, tuple[int, int]] = DEATHS, noise: float = 0.0) -> list[StepRecord]:
    """4 replicas, 0.2 s for an iteration of 32 samples; in a death's iteration 0.35 s."""
    made, alive = [], list(range(REPLICAS))
    for n in range(1, iterations + 1):
        if n in deaths:
            alive.remove(deaths[n][1])
        made.append(
            StepRecord(
                iteration=n,
                loss=(2 + 3 * math.exp(-n / 15) + 0.05 * math.sin(7 * n)) * (1 + noise * (n == 41)),
                grad_norm=1.0,
                consumed_samples=M * SIZE * n,
                epoch=1 + sum(death <= n for death in deaths),
                replicas=len(alive),
                seconds=0.2 * REPLICAS / len(alive) + (0.15 if n in deaths else 0),
                microbatches=shares(alive),
            )
        )
    return made


def write_steps(folder: Path, made: list[StepRecord], end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.jsonl").write_text("".join(step.to_json() + "\n" for step in made) + end)
    return folder


def write_lines(path: Path, events: list[Event]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def worker_events() -> list[Event]:
    shape = {"tp": 2, "pp": 1, "cp": 1, "ep": 1}
    start = {"event": "start", "time": T0, "worker": 0, "iteration": 1, "world": 8, "shape": shape}
    events: list[Event] = [{**start, "replicas": [0, 1, 2, 3], "microbatches": M}]
    alive = list(range(REPLICAS))
    for number, (iteration, (worker, replica)) in enumerate(DEATHS.items()):
        alive.remove(replica)
        at, epoch = T0 + iteration, 2 + number
        for writer in (7, 6):  # two workers tell it; the second took longer
            slower = 0.004 * (writer == 6)
            events.append(
                {
                    "event": "plan", "time": at + 0.03, "worker": writer, "iteration": iteration, "epoch": epoch,
                    "replicas": list(alive), "spares": [worker ^ 1], "lost_workers": [worker],
                    "lost_replicas": [replica], "quotas": {str(r): len(ids) for r, ids in shares(alive).items()},
                    "phase": "backward", "seconds": {"rendezvous": 0.012 + slower, "regroup": 0.02},
                }
            )  # fmt: skip
        parts = {"rendezvous": 0.016, "regroup": 0.02, "pull": 0.005, "rerun": 0.085, "reduce": 0.02, "agree": 0.004}
        parts["rerun"] += number / 100
        events.append(
            {
                "event": "recovery", "time": at + 0.15, "worker": 7, "iteration": iteration, "epoch": epoch,
                "reran": {"1": [2, 6], "3": [10, 14]}, "seconds": parts,
            }
        )  # fmt: skip
    events += [
        {"event": "quotas", "time": T0 + 40, "worker": 7, "iteration": 40, "quotas": {"1": 6, "3": 10},
         "seconds_per_microbatch": {"1": 0.05, "3": 0.03}},
        {"event": "checkpoint abandoned", "time": T0 + 33.1, "worker": 7, "iteration": 33, "number": 1},
        {"event": "again", "time": T0 + 46, "worker": 6, "iteration": 46, "what": "checkpoint"},
        {"event": "again", "time": T0 + 46.1, "worker": 7, "iteration": 46, "what": "checkpoint"},
        {"event": "end", "time": T0 + 50, "worker": 7, "iteration": 50},
    ]  # fmt: skip
    return events


def coordinator_events() -> list[Event]:
    events: list[Event] = [
        {"event": "listening", "time": T0 - 2, "mono": 1.0, "address": "127.0.0.1:1", "world": 8},
        {"event": "revoke", "time": T0 - 1, "mono": 2.0, "epoch": 1, "reason": "the run starts", "members": [[0, 8]]},
        {"event": "plan", "time": T0 - 0.5, "mono": 2.5, "epoch": 1, "members": [[0, 8]], "committed": 0,
         "seconds": {"rendezvous": 0.5}},
    ]  # fmt: skip
    for number, (iteration, (worker, _)) in enumerate(DEATHS.items()):
        at, common = T0 + iteration, {"mono": 3.0 + number}
        reason = "SIGKILL" if number == 0 else "no progress & <b>silent</b>"
        fault = {"event": "fault", "time": at, "kind": "dead", "worker": worker, "host": "node1", "reason": reason}
        seconds = {"rendezvous": 0.011, "since_fault": 0.012}
        events += [
            {**fault, **common},
            {"event": "revoke", "time": at + 0.001, "epoch": 2 + number, "reason": "it died", "members": [], **common},
            {"event": "plan", "time": at + 0.012, "epoch": 2 + number, "members": [], "committed": iteration - 1,
             "seconds": seconds, **common},
        ]  # fmt: skip
    return [*events, {"event": "stop", "time": T0 + 51, "mono": 9.0, "code": 0, "reason": "all workers have left"}]


def chaos_events() -> list[Event]:
    return [
        {"event": "strike", "time": T0 + 20 - 0.003, "worker": 5, "pid": 7, "kind": "kill"},
        {"event": "strike", "time": T0 + 33 - 2.5, "worker": 1, "pid": 8, "kind": "stop"},
    ]


def write_run(folder: Path, noise: float = 0.0) -> Path:
    """A whole run: two deaths, both survived."""
    write_steps(folder, steps(noise=noise))
    write_lines(folder / "events.jsonl", worker_events())
    write_lines(folder / "events-0.jsonl", coordinator_events())
    write_lines(folder / "events-1.jsonl", [{"event": "listening", "time": T0 - 1.9, "mono": 1.1, "world": 8}])
    write_lines(folder / "chaos.jsonl", chaos_events())
    return folder


def grid(replicas: Iterable[int]) -> dict[str, list[int]]:
    """Replica -> its workers."""
    return {str(replica): [2 * replica, 2 * replica + 1] for replica in replicas}


def write_long_run(folder: Path) -> Path:
    """The same with all that fills a page: lanes, goodput, checkpoints, workers that have ended, a command line."""
    write_run(folder)
    made = [dataclasses.replace(step, seconds=2.4 * step.seconds, time=T0 + step.iteration + 0.2) for step in steps()]
    write_steps(folder, made)
    argv = ["--tensor-model-parallel-size", "2", "--recover", "--data-path", "/a/folder/with/a/long/name" * 6]
    told: list[Event] = []
    for event in worker_events():
        moved = {**event}
        if event["event"] == "start":
            moved |= {"argv": argv, "versions": {"torch": "2.13.0", "megatron-core": "0.19.0"}, "tokens_per_sample": 64}
        if event["event"] == "plan":
            moved |= {"grid": grid(event["replicas"])}
        told.append(moved)
    first = {"event": "plan", "time": T0, "worker": 0, "iteration": 1, "epoch": 1, "replicas": [*range(REPLICAS)]}
    told.insert(1, {**first, "grid": grid(range(REPLICAS)), "spares": [], "lost_workers": [], "lost_replicas": []})
    for iteration in range(10, 50, 10):
        saved = {"event": "snapshot", "iteration": iteration + 1, "epoch": 1, "after": iteration, "worker": 0}
        told.append({**saved, "time": T0 + iteration, "seconds": {"waited": 0.01, "behind": 0.1}})
    told.append({"event": "checkpoint", "time": T0 + 46, "worker": 0, "saved": 46, "folder": "/runs/first/checkpoint"})
    write_lines(folder / "events.jsonl", sorted(told, key=lambda event: event["time"]))
    dead = {worker for worker, _ in DEATHS.values()}
    workers = [
        {"worker_id": n, "host": "node1", "state": "killed" if n in dead else "finished", "exit_code": None if n in dead
         else 0, "signal": 9 if n in dead else None}
        for n in range(2 * REPLICAS)
    ]  # fmt: skip
    (folder / "workers.json").write_text(json.dumps(workers))
    return folder
