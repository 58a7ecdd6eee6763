"""The lanes of the report's page: what a worker was when; and the recoveries in the Chrome trace format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.report import lanes
from recover_megatron.report.full import main
from recover_megatron.report.goodput import USES
from recover_megatron.report.history import history
from recover_megatron.report.lanes import (
    KINDS,
    MARKS,
    Mark,
    Stretch,
    in_words,
    legend,
    round_times,
    since,
    stretches,
    svg,
    trace,
)
from recover_megatron.report.page import marks
from recover_megatron.run_log.events import Event
from tests.report.synthetic import T0, coordinator_events, grid, worker_events, write_lines, write_run

PAGE = Path(lanes.__file__).with_name("page.html").read_text()
END: Event = {"event": "end", "time": 20.0}


def plan(time: float, grid: dict[str, list[int]], **more: object) -> Event:
    return {"event": "plan", "time": time, "grid": grid, **more}


def told(event: str, time: float, worker: int) -> Event:
    return {"event": event, "time": time, "worker": worker}


def of(worker: int, found: list[Stretch]) -> list[tuple[float, float, str]]:
    return [(s.begin, s.end, s.kind) for s in found if s.worker == worker]


def test_a_lane_says_what_its_worker_was_when() -> None:
    events = [
        plan(1.0, {"0": [7]}),
        {"event": "start", "time": 10.0},
        plan(10.0, {"0": [0], "1": [1]}),
        plan(12.0, {"0": [0]}, spares=[1]),
        plan(13.0, {"0": [0]}, spares=[1]),
        plan(15.0, {"0": [0], "1": [4]}),
        END,
    ]
    assert stretches(events) == [
        Stretch(0, 10, 20, "training"),
        Stretch(1, 10, 12, "training"), Stretch(1, 12, 15, "spare"), Stretch(1, 15, 20, "gone"),
        Stretch(4, 15, 20, "training"),
    ]  # fmt: skip
    drawn = svg(stretches(events), [Mark(15, "<one>"), Mark(99, "after the end")])
    assert drawn.count("<rect") == 5
    assert drawn.count('class="mark recovery"') == 1
    assert "&lt;one&gt;" in drawn
    words = "A lane for each of 3 workers over time; at the end 2 training, 0 spare, 1 gone; 1 recovery"
    assert f'aria-label="{words}"' in drawn
    assert svg([], []) == ""
    assert stretches([]) == []


def test_a_replica_that_is_set_aside_is_no_loss_and_comes_back() -> None:
    plans = [plan(1, {"0": [0], "1": [1]}), plan(5.1, {"0": [0]}), plan(8.1, {"0": [0]}, spares=[1])]
    events = [*plans, plan(9, {"0": [0], "1": [1]}), END]
    found = stretches(events, [told("aside", 5, 1), told("back", 8, 1)])
    assert of(1, found) == [(1, 5, "training"), (5, 8, "aside"), (8, 9, "spare"), (9, 20, "training")]
    assert of(0, found) == [(1, 20, "training")]
    assert "1 set aside" not in in_words(found, [])
    assert "set aside at some time: workers 1" in in_words(found, [])


def test_who_was_aside_and_is_put_out_or_dies_is_gone() -> None:
    events = [plan(1, {"0": [0], "1": [1]}), plan(5.1, {"0": [0]}), plan(12.1, {"0": [0]}), END]
    found = stretches(events, [told("aside", 5, 1), told("fault", 12, 1)])
    assert of(1, found) == [(1, 5, "training"), (5, 12, "aside"), (12, 20, "gone")]
    still = stretches(events, [told("aside", 5, 1)])
    assert of(1, still) == [(1, 5, "training"), (5, 20, "aside")]
    assert "at the end 1 training, 0 spare, 1 set aside, 0 gone" in in_words(still, [])


def test_workers_of_a_drained_node_are_about_to_leave_and_have_left() -> None:
    events = [
        plan(1, {"0": [0, 3], "1": [1, 4]}, draining=[], leaving=[]),
        plan(4, {"0": [0, 3], "1": [1, 4]}, draining=["b"], leaving=[1]),
        plan(5, {"0": [0, 3]}, spares=[1, 4], draining=["b"], leaving=[]),
        plan(7, {"0": [0, 3]}, spares=[4], draining=["b"], leaving=[]),
        END,
    ]
    ends = [told("left", 6, 1), told("left", 19.5, 0), told("left", 20.5, 3)]  # two finish
    found = stretches(events, ends)
    assert of(1, found) == [(1, 4, "training"), (4, 5, "draining"), (5, 6, "spare"), (6, 20, "left")]
    assert of(4, found) == [(1, 4, "training"), (4, 5, "draining"), (5, 20, "spare")]
    assert of(0, found) == [(1, 20, "training")]
    assert "at the end 2 training, 1 spare, 1 left, 0 gone" in in_words(found, [])
    assert "draining at some time: workers 1, 4" in in_words(found, [])


def test_a_hot_spare_is_told_from_one_that_lost_its_place() -> None:
    events = [
        plan(1, {"0": [0], "1": [1]}, spares=[2]),
        plan(5, {"0": [0]}, spares=[1, 2]),
        plan(6, {"0": [0], "1": [2]}, spares=[1]),
        plan(8, {"0": [0]}, spares=[1, 2]),
        END,
    ]
    found = stretches(events)
    assert of(1, found) == [(1, 5, "training"), (5, 20, "spare")]
    assert of(2, found) == [(1, 6, "hot-spare"), (6, 8, "training"), (8, 20, "spare")]


def test_only_the_last_launch_counts_and_a_run_that_goes_on_reaches_to_its_last_step() -> None:
    events = [plan(1, {"0": [7]}), {"event": "start", "time": 10.0}, plan(10, {"0": [0]})]
    found = stretches(events, [told("left", 3, 0), told("aside", 4, 0), told("left", 99, 0), told("left", 50, 5)], 60)
    assert found == [Stretch(0, 10, 60, "training")]


def test_rollbacks_and_snapshots_are_marks_with_a_key_and_words() -> None:
    back = {"event": "rolled back", "time": T0 + 34, "worker": 0, "iteration": 34, "epoch": 3, "lost": 3, "to": 30}
    events = [
        *worker_events(),
        {**back, "tier": "memory"},
        {**back, "tier": "disk", "time": T0 + 35},
        {"event": "snapshot", "time": T0 + 31, "worker": 0, "after": 30, "iteration": 31, "epoch": 2},
    ]
    events.sort(key=lambda event: event["time"])
    made = marks(history(events, [], []), events)
    assert [(mark.time - T0, mark.kind) for mark in made][-3:] == [
        (34, "from-memory"), (35, "from-disk"), (31, "snapshot"),
    ]  # fmt: skip
    assert made[-3].text == "rolled back to iteration 30 from memory, iterations 31 to 33 run again"
    found = [Stretch(0, T0, T0 + 50, "training")]
    drawn = svg(found, made)
    assert [drawn.count(f'class="mark {kind}"') for kind in MARKS] == [2, 1, 1, 1]
    assert ">snapshots</text>" in drawn
    assert [key.css for key in legend(found, made)] == ["training", *(f"mark {kind}" for kind in MARKS)]
    words = "2 recoveries; 1 rollback to a snapshot in memory; 1 rollback to a checkpoint; 1 snapshot in memory"
    assert words in in_words(found, made)
    many = [Mark(T0 + n / 100, "", "snapshot") for n in range(1, 5000)]
    assert svg(found, many).count('class="mark snapshot"') <= lanes.MOST_TICKS


def test_who_comes_is_no_loss_and_who_ends_with_the_run_or_before_it_is_no_recovery(tmp_path: Path) -> None:
    """A launch that could not start; then one of two losses, a newcomer, and a worker that the run's end ended."""
    fault = {"event": "fault", "kind": "dead", "host": "n", "reason": "its process has ended"}
    listening = {"event": "listening", "address": "127.0.0.1:1", "world": 8}
    refused = [{**listening, "time": T0 - 90}, {**fault, "time": T0 - 80, "worker": 0}]
    came = {"event": "plan", "time": T0 + 44, "epoch": 4, "members": [], "committed": 43, "seconds": {}}
    told = [event for event in coordinator_events() if event["event"] != "stop"]
    stop = {"event": "stop", "time": T0 + 49.2, "code": 143, "reason": "ended by SIGTERM"}
    told += [came, {**fault, "time": T0 + 49, "worker": 2}, stop]
    events = worker_events()
    made = history(events, [*refused, *told], [])
    assert (made.launches, made.workers_lost, made.losses, len(made.recoveries)) == (2, 2, 2, 5)
    assert [mark.time - T0 for mark in marks(made, events)] == [20, 33, 44]
    found = [Stretch(0, T0 + 30, T0 + 50, "training")]
    assert "; 2 recoveries" in in_words(found, marks(made, events)), "of those that the picture shows"
    folder = write_run(tmp_path / "run")
    write_lines(folder / "events-0.jsonl", [*refused, *told])
    main([str(folder)])
    page = re.sub(r"<[^>]+>|\s+", " ", (folder / "report.html").read_text())
    assert re.search(r"2 workers lost +in 2 recoveries", page)


@pytest.mark.parametrize("name", [*KINDS, *MARKS, *USES])
def test_each_has_a_colour_of_its_own_for_light_and_for_dark(name: str) -> None:
    rule = re.search(rf"\.{name}\b[^{{}}]*{{ --is: var\((--[\w-]+)\)", PAGE)
    assert rule is not None
    light, dark = PAGE.split("@media screen and (prefers-color-scheme: dark)", 1)
    colours = [re.search(rf"{rule[1]}: (#\w+)", part) for part in (light, dark.split("}", 1)[0])]
    assert all(colours)
    assert colours[0][1] != colours[1][1]  # type: ignore[index]


def test_no_two_kinds_look_the_same() -> None:
    light, dark = PAGE.split("@media screen and (prefers-color-scheme: dark)")
    for part in (light, dark):
        colours = {name: re.search(rf"--{name}: (#\w+)", part)[1] for name in KINDS}  # type: ignore[index]
        assert len(set(colours.values())) == len(KINDS), colours


def test_the_page_has_lanes_with_a_legend(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    events = worker_events()
    for event in events:
        if event["event"] == "plan":
            event["grid"] = grid(event["replicas"])
    first = {**plan(T0 + 0.1, grid(range(4))), "worker": 0, "iteration": 1, "epoch": 1}
    write_lines(run / "events.jsonl", [events[0], {**first, "replicas": [0, 1, 2, 3]}, *events[1:]])
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert '<span class="key training"></span>training' in page
    assert '<span class="key mark recovery"></span>recovery' in page
    assert 'class="key aside"' not in page


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (0.4, ["0.0 s", "0.1 s", "0.2 s", "0.3 s", "0.4 s"]),
        (17, ["0 s", "5 s", "10 s", "15 s"]),
        (599, ["0 s", "100 s", "200 s", "300 s", "400 s", "500 s"]),
        (601, ["0 min", "2 min", "4 min", "6 min", "8 min", "10 min"]),
        (18000, ["0.0 h", "1.0 h", "2.0 h", "3.0 h", "4.0 h", "5.0 h"]),
        (86400 * 7, ["0 h", "50 h", "100 h", "150 h"]),
    ],
)
def test_the_times_below_a_picture_are_round(of: float, told: list[str]) -> None:
    assert [since(time, of) for time in round_times(of)] == told
    assert round_times(0) == [0]


WORKERS: list[Event] = [
    {"event": "start", "time": T0, "iteration": 1},
    {"event": "plan", "time": T0 + 10.1, "iteration": 7, "epoch": 2, "lost_workers": [1], "grid": {"0": [0]}},
    {"event": "recovery", "time": T0 + 11, "iteration": 7, "epoch": 2, "seconds": {"rendezvous": 0.5, "rerun": 0.25}},
]
COORDINATOR: list[Event] = [
    {"event": "fault", "time": T0 + 10, "worker": 1, "kind": "dead", "file": "events-0.jsonl"},
    {"event": "revoke", "time": T0 + 10.01, "epoch": 2, "file": "events-0.jsonl"},
    {"event": "plan", "time": T0 + 10.1, "epoch": 2, "file": "events-0.jsonl"},
]


def test_phases_lie_behind_each_other_within_their_recovery_and_a_rendezvous_is_a_span() -> None:
    made = {entry["name"]: entry for entry in trace(WORKERS, COORDINATOR)["traceEvents"] if entry["ph"] != "M"}
    recovery, first, second = (made[name] for name in ("recovery in iteration 7", "rendezvous", "rerun"))
    assert (recovery["dur"], first["dur"], second["dur"]) == (750_000, 500_000, 250_000)
    assert recovery["ts"] == first["ts"] == round((T0 + 10.25) * 1e6)
    assert second["ts"] == first["ts"] + first["dur"]
    meeting = made["rendezvous of epoch 2"]
    assert (meeting["ts"], meeting["dur"]) == (round((T0 + 10.01) * 1e6), 90_000)
    assert made["fault of worker 1"]["ph"] == "i"
    assert meeting["tid"] == made["fault of worker 1"]["tid"] != recovery["tid"]


def spans(made: Mapping[str, Any], name: str) -> list[tuple[int, int]]:
    """Beginning and end of each, in microseconds."""
    return [(e["ts"], e["ts"] + e["dur"]) for e in made["traceEvents"] if e["ph"] == "X" and e["name"].startswith(name)]


def test_every_lane_of_a_trace_has_a_name_that_a_user_knows_and_a_worker_has_one() -> None:
    first = {"event": "attached", "time": T0, "worker": 0, "host": "a", "file": "events-0.jsonl"}
    made = trace(WORKERS, [first, *COORDINATOR], "my-run")
    kinds = ("process_name", "thread_name")
    names = [{(e["pid"], e["tid"]): e["args"]["name"] for e in made["traceEvents"] if e["name"] == k} for k in kinds]
    assert list(names[0].values()) == ["my-run", "workers"]
    assert list(names[1].values()) == ["training", "coordinator 0", "worker 0 on a"]
    shown = {(e["pid"], e["tid"]) for e in made["traceEvents"] if e["ph"] != "M"}
    assert shown == set(names[1])
    assert {pid for pid, _ in shown} == {pid for pid, _ in names[0]}
    assert spans(made, "training") == [(round((T0 + 10.1) * 1e6), round((T0 + 11) * 1e6))]


def test_rounded_phases_do_not_reach_beyond_their_recovery() -> None:
    # Viewers leave out a span that begins in another one and ends after it.
    for n in range(1, 300):
        seconds = {"rendezvous": n / 7e5, "pull": n / 3e6, "agree": n / 11e6}
        recovery = {"event": "recovery", "time": T0 + n / 13, "iteration": n, "seconds": seconds}
        made = trace([recovery], [])
        [(begun, ended)] = spans(made, "recovery")
        inner = [span for phase in seconds for span in spans(made, phase)]
        assert all(begun <= first <= last <= ended for first, last in inner), n
        assert all(before[1] <= after[0] for before, after in pairwise(inner)), n


def test_a_rendezvous_that_a_launch_left_open_does_not_last_until_the_next_launch() -> None:
    again: list[Event] = [
        {"event": "listening", "time": T0 + 3600, "file": "events-0.jsonl"},
        {"event": "plan", "time": T0 + 3700, "epoch": 2, "file": "events-0.jsonl"},
    ]
    [(begun, ended)] = spans(trace([], [*COORDINATOR[:2], *again]), "rendezvous of epoch 2")
    assert begun == ended == (T0 + 3700) * 1e6


def test_the_command_writes_the_file_alone_and_a_folder_without_events_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert main([str(tmp_path), "--trace", str(out)]) == 2
    assert "no events of a run" in capsys.readouterr().err
    write_lines(tmp_path / "events.jsonl", WORKERS)
    assert main([str(tmp_path), "--trace", str(out)]) == 0
    assert {entry["name"] for entry in json.loads(out.read_text())["traceEvents"]} >= {"start", "rerun"}
    assert not (tmp_path / "report.html").exists()
    assert main([str(tmp_path), "--trace", str(tmp_path / "none" / "t.json")]) == 2
    assert f"cannot write {tmp_path}/none/t.json: No such file or directory" in capsys.readouterr().err
    write_lines(tmp_path / "events.jsonl", [{"event": "recovery", "time": T0, "seconds": [1]}])
    assert main([str(tmp_path), "--trace", str(out)]) == 2
    assert "does not match the schema" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--trace", str(out), "--out", "page.html", "--reference", str(tmp_path)])
    assert "--trace writes no page: leave out --out, --reference" in capsys.readouterr().err
