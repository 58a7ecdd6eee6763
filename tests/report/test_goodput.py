"""Goodput over wall-clock time: where each second went, and what the page shows of it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from recover_megatron.report.full import main
from recover_megatron.report.full import without_page as summary_alone
from recover_megatron.report.goodput import USES, Account, accounts, in_words, legend, svg
from recover_megatron.report.run_dir import read_run
from recover_megatron.run_log.events import Event, read_run_events
from recover_megatron.run_log.steps import StepRecord
from tests.report.synthetic import T0, steps, worker_events, write_lines, write_long_run, write_run, write_steps


def step(n: int, at: float, seconds: float = 1.0, replicas: int = 4, epoch: int = 1) -> StepRecord:
    return StepRecord(n, 3.0, 1.0, 8 * n, epoch, replicas, seconds, {0: [0]}, time=T0 + at)


def start(at: float = 0.0, replicas: int = 4) -> Event:
    return {"event": "start", "time": T0 + at, "worker": 0, "iteration": 1, "replicas": list(range(replicas))}


def recovery(at: float, iteration: int, epoch: int, **seconds: float) -> Event:
    return {"event": "recovery", "time": T0 + at, "iteration": iteration, "epoch": epoch, "seconds": seconds}


def spent(found: list[Account]) -> dict[str, float]:
    assert sum(found[-1].seconds.values()) == pytest.approx(found[-1].time - T0)
    return {use: round(seconds, 6) for use, seconds in found[-1].seconds.items() if seconds > 1e-6}


def test_a_run_without_losses_works_but_for_what_lies_between_its_iterations() -> None:
    assert spent(accounts([step(1, 1), step(2, 2)], [start()])) == {"work": 2}
    later = accounts([step(1, 3), step(2, 4)], [start(), {"event": "end", "time": T0 + 5}])
    assert spent(later) == {"work": 2, "outside": 3}
    assert [account.time - T0 for account in later] == [3, 4, 5]
    assert [account.shares["work"] for account in later] == pytest.approx([1 / 3, 1 / 2, 2 / 5])


def test_what_passed_before_a_run_was_stopped_counts_though_its_workers_told_no_end() -> None:
    told = [start(), {"event": "checkpoint", "time": T0 + 3}]
    stop = {"event": "stop", "time": T0 + 9, "code": 130}
    assert spent(accounts([step(1, 1), step(2, 2)], told, [stop])) == {"work": 2, "outside": 7}
    assert spent(accounts([step(1, 1), step(2, 2)], told, [{**stop, "time": T0 - 5}])) == {"work": 2, "outside": 1}


def test_a_recovery_and_fewer_replicas_are_no_work() -> None:
    told = [start(), recovery(4.5, 3, 2, rendezvous=0.5, rerun=1.0)]
    steps = [step(1, 1), step(2, 2), step(3, 4.5, 2.5, 3, epoch=2), step(4, 6.5, 2.0, 3, epoch=2)]
    assert spent(accounts(steps, told)) == {"work": 2 + 0.75 + 1.5, "below": 0.25 + 0.5, "recovering": 1.5}


def test_what_a_hang_took_until_it_was_known_is_waiting() -> None:
    told = [start(), recovery(14, 4, 2, rerun=1.0)]
    steps = [step(1, 1), step(2, 2), step(3, 3), step(4, 14, 11.0, 2, epoch=2)]
    assert spent(accounts(steps, told)) == {"work": 3.5, "below": 0.5, "recovering": 1, "waiting": 9}


def test_a_stall_that_many_shared_is_waiting_without_a_recovery_and_counts_once() -> None:
    stalled = {"event": "stalled", "time": T0 + 12, "seconds": 10.0}
    over = {"event": "stall_over", "time": T0 + 20, "seconds": 18.0}
    assert spent(accounts([step(1, 1), step(2, 21, 20.0)], [start()], [stalled, over])) == {"work": 3, "waiting": 18}


def test_what_was_taken_back_and_the_time_between_launches_is_outside() -> None:
    told = [start(), start(100, replicas=2), {"event": "end", "time": T0 + 102}]
    steps = [step(1, 1), step(2, 101, replicas=2), step(3, 102, replicas=2)]  # a second iteration 2 took its place
    assert spent(accounts(steps, told)) == {"work": 3, "outside": 99}


def test_of_clocks_that_disagree_no_second_counts_twice() -> None:
    found = accounts([step(1, 1), step(2, 1.5), step(3, 0.7), step(4, 3.5, 2.5)], [start()])
    assert spent(found) == {"work": 3.5}
    assert [account.time - T0 for account in found] == pytest.approx([0.7, 1, 1.5, 3.5], abs=1e-6)


def test_without_times_or_a_start_nothing_is_claimed() -> None:
    assert accounts([dataclasses.replace(step(1, 1), time=None), step(2, 2)], [start()]) == []
    assert accounts([step(1, 1)], []) == []
    assert accounts([step(1, -5)], [start()]) == []
    assert svg([]) == ""
    assert legend([]) == []


def test_the_picture_has_a_part_and_a_key_for_each_use_and_says_it_in_words() -> None:
    told = [start(), recovery(14, 4, 2, rerun=1.0), {"event": "end", "time": T0 + 16}]
    found = accounts([step(1, 1), step(2, 2), step(3, 3), step(4, 14, 11.0, 2, epoch=2)], told)
    drawn = svg(found)
    assert [css for css in USES if f'<polygon class="{css}"' in drawn] == list(USES)
    assert [(key.css, key.text) for key in legend(found)] == [
        ("work", "work 21.9%"),
        ("below", "missing replicas 3.1%"),
        ("recovering", "recovering 6.2%"),
        ("waiting", "waiting 56.2%"),
        ("outside", "outside committed iterations 12.5%"),
    ]
    assert in_words(found).startswith("Use of the 16 s since the start, as shares of the elapsed time: at")
    assert f'aria-label="{in_words(found)}"' in drawn


def test_of_a_long_run_the_picture_stays_small_and_ends_at_its_end() -> None:
    found = accounts([step(n, n) for n in range(1, 5001)], [start()])
    assert len(svg(found)) < 20_000
    assert "83 min" in svg(found)


def test_the_page_shows_it_and_does_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert "Goodput over time" not in (run / "report.html").read_text()  # its steps do not say when they were
    write_steps(run, [dataclasses.replace(s, time=T0 + s.iteration) for s in steps()])
    assert json.loads((run / "steps.jsonl").read_text().splitlines()[0])["time"] == T0 + 1
    write_lines(run / "events.jsonl", worker_events())
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<h2>Goodput over time</h2>" in page
    found = accounts([dataclasses.replace(s, time=T0 + s.iteration) for s in steps()], worker_events())
    share = found[-1].shares["work"]
    assert share == pytest.approx(0.2 * 49.999 / 50, rel=0.02)  # each iteration is worth 0.2 s of full strength, of 1 s
    assert f"<b>{share:.1%} goodput</b>" in page
    assert re.search(r'<span class="key outside"></span>outside committed iterations \d', page)


def test_both_commands_tell_the_goodput_in_their_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_long_run(tmp_path / "run")
    page_of = accounts(read_run(run).steps, *read_run_events(run)[:2])[-1]
    for command in (main, summary_alone):
        command([str(run), *(["--no-plot"] if command is summary_alone else [])])
        told = re.search(r"^goodput +([\d.]+)% of the time since the start; (.*)$", capsys.readouterr().out, re.M)
        assert told is not None
        assert float(told[1]) == pytest.approx(100 * page_of.shares["work"], abs=0.06)
        assert told[2].startswith("missing replicas ")
    write_run(run)  # without times
    assert summary_alone([str(run), "--no-plot"]) == 0
    assert "goodput" not in capsys.readouterr().out
    write_long_run(run)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "recovery", "time": 1}\n')
    assert summary_alone([str(run), "--no-plot"]) == 2
    assert "does not match the schema" in capsys.readouterr().err
