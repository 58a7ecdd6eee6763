"""From the coordinator's answer to what is shown: pure, safe for the terminal."""

from __future__ import annotations

import io
import json
import math
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from simulation import World, over_the_wire

from recover_megatron.membership.io.observer import NoAnswer
from recover_megatron.membership.messages.to_member import Stop, View
from recover_megatron.membership.records import AuthenticationError
from recover_megatron.membership.wire import TO_MEMBER, Secret
from recover_megatron.status.headline import Headline, Level, headline, span
from recover_megatron.status.model import Gone, RunStatus, Training, read
from recover_megatron.status.screen import follow, render
from recover_megatron.status.source import Watch
from tests.harness.waiting import DEADLINE


def row(worker: int, **fields: Any) -> dict[str, Any]:
    told = {"worker": worker, "fate": "live", "host": "h", "node": "", "silence": 0.1, "member": True, "joined": True}
    return {**told, "iteration": 0, "phase": "", "status": {}, **fields}


def placed(worker: int, replica: int, position: int, **fields: Any) -> dict[str, Any]:
    return row(worker, status={"replica": replica, "position": position}, **fields)


def text(status: RunStatus, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False, markup=False)
    console.print(render(status, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


GRID = [placed(r * 2 + p, r, p, iteration=7, phase="forward", microbatch=3) for r in range(3) for p in range(2)]
VIEW = {
    "state": "steady", "term": 1 << 32, "epoch": 1, "opened": 1, "committed": 8, "commit_age": 0.4,
    "launched": 6, "world": 6, "live": 6, "replicas": [[0, 2]], "replica_size": 2, "workers": GRID, "hidden": 0,
    "faults": [], "recoveries": [],
}  # fmt: skip


def view(**fields: Any) -> View:
    """Return the view with other ``fields``."""
    return View(**{**VIEW, **fields})


def seen(**fields: Any) -> RunStatus:
    """Return the status that is read from the view."""
    return read(view(**fields), "a:1")


def test_the_grid_has_the_workers_of_each_replica_by_position() -> None:
    status = seen(workers=[placed(3, 1, 0), placed(2, 1, 1), *GRID[:2], *GRID[4:5]])
    assert [(replica.replica, [worker.worker for worker in replica.workers]) for replica in status.grid] == [
        (0, [0, 1]),
        (1, [3, 2]),
    ]
    assert (status.iteration, status.replicas_of_launch) == (7, 3)


def test_a_run_that_has_grown_says_so_and_is_healthy() -> None:
    further = [placed(6 + r * 2 + p, 3 + r, p, iteration=7, phase="forward") for r in range(2) for p in range(2)]
    status = seen(world=10, live=10, replicas=[[0, 4]], workers=[*GRID, *further])
    assert (len(status.grid), status.replicas_of_launch) == (5, 3)
    assert "5 (3 at launch)" in text(status)
    assert headline(status).text == "HEALTHY 5 replicas (3 at launch)"


def test_a_run_of_the_library_that_has_lost_a_worker_is_degraded_until_another_has_come() -> None:
    """Its plans tell of no replicas; who leaves at the end is not missing."""
    whole = {"replicas": [], "replica_size": 0, "launched": 3, "world": 3, "live": 3}
    workers = [row(n, iteration=7, phase="forward") for n in range(3)]
    assert headline(seen(**{**whole, "workers": workers})).text == "HEALTHY"
    dead, left = ({"worker": 2, "fate": fate, "host": "h", "why": "", "ago": 2.0} for fate in ("dead", "left"))
    fewer = seen(**{**whole, "live": 2, "workers": [*workers[:2], dead]})
    assert headline(fewer) == Headline("DEGRADED", "DEGRADED 2/3 workers", Level.WARNING)
    assert headline(seen(**{**whole, "live": 2, "workers": [*workers[:2], left]})).word == "HEALTHY"
    came = {**whole, "world": 4, "live": 3, "workers": [*workers[:2], dead, row(3)]}
    assert headline(seen(**came)).word == "HEALTHY"


def test_a_replica_that_lost_a_worker_does_not_run_and_its_other_workers_are_spares() -> None:
    dead = {"worker": 3, "fate": "dead", "host": "h", "why": "its connection was closed", "ago": 2.0}
    status = seen(workers=[dead if r["worker"] == 3 else r for r in GRID])
    assert [replica.replica for replica in status.grid] == [0, 2]
    assert [(worker.worker, worker.note) for worker in status.spares] == [(2, "replica 1 is not complete")]
    shown = text(status)
    assert "2 of 3" in shown
    assert "its connection was closed" in shown


def test_a_worker_stands_where_it_says_now_whatever_it_joined_with() -> None:
    """A plan may have put it into a new replica."""
    spare = {"replica": None, "position": 1, "note": "replica 0 is broken"}
    rows = [placed(0, 1, 0), placed(1, 1, 1), row(2, status=spare | {"position": 0}), row(3, status=spare)]
    rows[2]["place"], rows[3]["place"] = [0, 0, 5], [0, 1, 5]
    status = seen(workers=rows)
    assert [(r.replica, [w.worker for w in r.workers], r.quota) for r in status.grid] == [
        (0, [2, 3], 5),
        (1, [0, 1], None),
    ]
    assert not status.spares


def test_a_spare_says_why_it_is_one() -> None:
    spare = row(6, status={"replica": None, "note": "worker 3 of its replica died"}, idle=True)
    status = seen(workers=[*GRID, spare])
    assert [worker.worker for worker in status.spares] == [6]
    assert "worker 3 of its replica died" in text(status)


def test_without_positions_a_replica_runs_with_as_many_workers_as_it_ever_had() -> None:
    rows = [row(n, status={"replica": n // 2}) for n in range(3)]
    status = seen(workers=rows)
    assert [replica.replica for replica in status.grid] == [0]


def test_a_plan_that_tells_no_replicas_shows_the_workers() -> None:
    rows = [row(n, iteration=4, status={}) for n in range(2)]
    status = seen(replicas=[], replica_size=0, workers=rows)
    assert (status.grid, status.spares, [worker.worker for worker in status.unplaced]) == ([], [], [0, 1])
    assert status.replicas_of_launch is None
    assert status.iteration == 4


def test_a_loss_that_is_not_finite_is_null_in_json() -> None:
    trained = Training(7, 10, math.nan, *[None] * 8, 0, 0)  # type: ignore[arg-type]
    status = replace(seen(workers=[row(0, iteration=8, loss=[7, None])]), training=trained)
    told = status.to_json()
    json.dumps(told, allow_nan=False)
    assert (told["loss"], told["training"]["loss"], told["training"]["iteration"]) == (None, None, 7)
    finite = replace(status, loss=2.5, training=replace(trained, loss=3.5)).to_json()
    assert (finite["loss"], finite["training"]["loss"]) == (2.5, 3.5)


def test_an_open_rendezvous_names_whom_it_waits_for() -> None:
    """Of a recovery that does not get on: who is missing, what was last heard of it, and since when."""
    late = placed(1, 1, 0, joined=False, silence=11.0, phase="forward", marked=11.2)
    rows = [late if n == 1 else placed(n, n, 0, waiting=9.0 + n) for n in range(3)]
    fault = {"ago": 30.0, "kind": "dead", "worker": 9, "host": "h", "why": ""}
    plan = {"ago": 25.0, "epoch": 1, "reason": "", "workers": 4, "seconds": {}}
    status = seen(state="rendezvous", opened=2, workers=rows, faults=[fault], recoveries=[plan])
    waits = "2 of 3 workers are ready for epoch 2; not ready: worker 1 on h (silent for 11 s, in forward)"
    assert f"RECOVERING for 11 s: {waits}" in text(status)
    assert status.to_json()["between"] == 11.0
    assert seen().to_json()["between"] is None

    struck = seen(state="rendezvous", opened=2, workers=rows, faults=[fault, {**fault, "ago": 14.0}], recoveries=[plan])
    assert "RECOVERING for 14 s: " in text(struck)
    many = [placed(n, n, 0, joined=n == 7) for n in range(8)]
    assert "not ready: workers 0-6" in text(seen(state="rendezvous", opened=2, workers=many))


def test_a_start_that_does_not_get_on_says_who_has_not_come_and_since_when() -> None:
    rows = [row(n, joined=False, member=False, marked=40.0 + n) for n in range(3)]
    rows += [row(3, host="", silence=None, joined=False, member=False)]
    status = seen(state="rendezvous", epoch=0, replicas=[], replica_size=0, workers=rows, world=4, live=4)
    assert "STARTING for 42 s: 3 of 4 workers are connected, but not worker 3 " in text(status)
    started = time.time() - 50
    processes = {n: {"worker_id": n, "pid": 70 + n, "host": "vm", "started": started + n} for n in range(4)}
    told = status.with_files(None, processes)
    assert "STARTING for 50 s: 3 of 4 workers are connected, but not worker 3 on vm (pid 73)" in text(told)

    nobody = seen(state="standby", epoch=0, workers=[{**each, "silence": None} for each in rows], world=4, live=4)
    assert "STARTING for 42 s: none of 4 workers are connected " in text(nobody)

    rows[3] |= {"host": "h", "silence": 20.0, "marked": 21.0}
    building = seen(state="rendezvous", epoch=0, workers=rows, world=4, live=4)
    assert "build their models; no messages from worker 3 on h (silent for 20 s)" in text(building)
    ready = [{**each, "joined": each["worker"] != 3} for each in rows]
    told = seen(state="rendezvous", epoch=0, replicas=[], replica_size=0, workers=ready, world=4, live=4)
    assert "3 of 4 workers are ready to train; not ready: worker 3 on h (silent for 20 s)" in text(told)


def test_columns_of_which_nothing_is_known_take_no_room() -> None:
    def heads(*gone: Gone) -> list[list[str]]:
        shown = text(replace(seen(workers=GRID), gone=gone))
        return [line.split() for line in shown.splitlines() if line.startswith("worker ")]

    killed = Gone(3, "dead", "h", "why", 2.0)
    assert heads(killed) == [["worker", "host", "when", "why"]]
    alone = text(replace(seen(workers=GRID), gone=[replace(killed, host="", exit="SIGKILL, out of memory")]))
    assert "SIGKILL, out of memory  why" in alone  # in one line, whatever else is not known
    assert heads(killed, replace(killed, exit="SIGKILL")) == [["worker", "host", "when", "exit", "why"]]


def test_at_the_end_who_left_in_order_or_was_aside_is_not_lost() -> None:
    fates = {0: "left", 1: "left", 2: "aside", 3: "dead", 4: "out", 5: "left"}
    gone = [{"worker": n, "fate": fate, "host": "h", "why": "", "ago": 1.0} for n, fate in fates.items()]
    ended = replace(seen(workers=gone), state="stopped", code=0, reason="all workers have left")
    assert "workers 6, 2 of them lost, 1 set aside at the end" in text(ended)
    assert [worker.worker for worker in ended.lost] == [3, 4]
    assert "workers 6, 0 of them lost " in text(replace(ended, gone=[g for g in ended.gone if g.fate == "left"]))


@pytest.mark.parametrize(("code", "word"), [(0, "ENDED: finished, "), (10, "ENDED: ")])
def test_the_end_of_a_run_is_told(code: int, word: str) -> None:
    status = read(Stop("so be it", code, 4), "a:1")
    assert f"{word}exit code {code}: so be it" in text(status)
    assert json.loads(json.dumps(status.to_json()))["code"] == code


@pytest.mark.parametrize("spoiled", [{"workers": [{}]}, {"workers": [1]}, {"faults": [{"of": "another"}]}])
def test_rows_that_no_coordinator_of_this_version_makes_are_no_answer(
    spoiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch([("h", 1)], Secret(b"a secret of many bytes"))
    monkeypatch.setattr("recover_megatron.status.source.Observer", lambda *_: Answering(view(**spoiled)))
    with pytest.raises(NoAnswer, match="h:1 answers with a view that cannot be read"):
        watch.look()


class Answering:
    """In place of an observer."""

    name = "h:1"

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def ask(self, drain: str | None) -> dict[str, Any]:
        return self._answer

    def close(self) -> None:
        pass


def test_a_view_is_short_where_there_is_little_room() -> None:
    many = [placed(n, n // 2, n % 2, iteration=7, phase="forward") for n in range(2000)]
    status = seen(workers=many, replica_size=2)
    short = text(status, 30)
    assert len(short.splitlines()) <= 30
    assert "more replicas" in short
    assert len(text(status).splitlines()) > 2000


@given(st.text())
def test_what_a_member_says_steers_no_terminal(said: str) -> None:
    rows = [row(0, status={"note": said, "replica": None}), {**row(1), "fate": "dead", "why": said, "host": said}]
    faults = [{"ago": 1.0, "kind": "dead", "worker": 1, "host": said, "why": said}]
    shown = text(seen(workers=rows, faults=faults))
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_markup_in_a_message_is_shown_as_it_is() -> None:
    status = seen(workers=[row(0, status={"note": "[red]x[/red]", "replica": None})])
    assert "[red]x[/red]" in text(status)


def test_a_simulated_run_with_a_death_is_shown() -> None:
    world = World(4)
    world.run_fairly(4.0)
    world.kill_worker(2)
    world.run_fairly(3.0)
    leader = world.coordinators[0]
    status = read(over_the_wire(leader.view(world.now), TO_MEMBER), "a:1")
    assert [(gone.worker, gone.fate, gone.why) for gone in status.gone] == [(2, "dead", "connection closed")]
    assert [(plan.epoch, plan.workers) for plan in status.recoveries] == [(1, 4), (2, 3)]
    assert status.recoveries[1].since_fault is not None
    assert "worker 2 on node1 died" in text(status)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0 s"), (9.9, "9.9 s"), (100, "100 s"), (600, "10 min"), (9000, "2.5 h"), (None, "")],
)
def test_times_are_short(seconds: float | None, shown: str) -> None:
    assert span(seconds) == shown


def test_a_stall_comes_first_with_who_is_where_and_for_how_long_it_is_waited() -> None:
    world = World(4)
    world.run_fairly(10)
    world.frozen |= {"w0", "w1", "w2"}
    while not world.coordinators[0].lateness.stall.reported:
        world.run_fairly(1)
    coordinator = world.coordinators[0]
    status = read(over_the_wire(coordinator.view(world.now), TO_MEMBER), "a:1")
    assert status.stall is not None
    assert list(status.stall.workers) == [0, 1, 2]
    shown = text(status)
    assert "STALLED for" in shown
    assert "waits for workers 0, 1, 2" in shown
    assert "worker 0 on node0: no progress for" in shown
    assert "(--recover-stall-timeout)" in shown
    assert "whose replica is not known" not in shown, "plans tell of none, as those of the library"
    assert json.loads(json.dumps(status.to_json()))["stall"]["workers"] == [0, 1, 2]
    assert "without limit" in text(replace(status, stall=replace(status.stall, left=None)))
    held = [replace(worker, phase="checkpoint") for worker in status.unplaced]
    assert "(limit for a checkpoint: an hour)" in text(replace(status, unplaced=held))


class Answers:
    """The source of a live view, which gives one answer after the other and raises those that are errors."""

    def __init__(self, *answers: RunStatus | Exception) -> None:
        self._answers = iter(answers)

    def look(self, drain: str | None = None) -> RunStatus:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """There is nothing to close."""


def test_a_live_view_goes_on_when_a_coordinator_goes_away_while_the_secret_is_proved_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The closed connection looks like a refused secret; only a view that has shown nothing yet ends with that."""
    refused: Any = AuthenticationError("a:1 rejects the secret")
    over = read(Stop("all have left", 0, 3), "a:1")
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    monkeypatch.setattr("recover_megatron.status.screen._console", lambda: console)
    follow(Answers(seen(), refused, over), interval=0.0, patience=DEADLINE)  # type: ignore[arg-type]
    complaint = r"no coordinator answers for \d+ s: a:1 rejects the secret.*all have left"
    assert re.search(complaint, console.file.getvalue(), re.DOTALL)  # type: ignore[attr-defined]
    with pytest.raises(AuthenticationError):
        follow(Answers(refused), interval=0.0, patience=DEADLINE)  # type: ignore[arg-type]
