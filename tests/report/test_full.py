"""recover-report: what its page says of a run, number by number, and what it says of a bad one."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.report import plot
from recover_megatron.report.full import main
from recover_megatron.report.history import history
from recover_megatron.report.page import ids_in_runs
from recover_megatron.report.run_dir import TOLERANCE, compare, unfit
from recover_megatron.report.summary import levels, rates
from recover_megatron.run_log.events import read_run_events
from recover_megatron.run_log.steps import StepRecord
from tests.report.synthetic import (
    DEATHS,
    SIZE,
    T0,
    M,
    chaos_events,
    coordinator_events,
    steps,
    worker_events,
    write_lines,
    write_run,
    write_steps,
)


class Text(HTMLParser):
    """The text of a page, cell by cell; fails for a tag that is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.rows: list[list[str]] = []
        self.images: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            self.images.append(values["src"] or "")
        elif tag != "meta":
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data

    def table(self, *head: str) -> list[dict[str, str]]:
        """The rows of the table whose head has all of ``head``."""
        at = next(n for n, row in enumerate(self.rows) if set(head) <= set(row))
        found = []
        for row in self.rows[at + 1 :]:
            if len(row) != len(self.rows[at]) or not row[0].strip().isdigit():
                break
            found.append(dict(zip(self.rows[at], row, strict=True)))
        return found

    def beside(self, text: str) -> str:
        """The text that follows ``text`` on the page."""
        return self.cells[self.cells.index(text) + 1]


def report(folder: Path, *options: object) -> tuple[int, Text]:
    code = main([str(folder), *map(str, options)])
    return code, Text((folder / "report.html").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_the_verdict_is_on_top(run: Path) -> None:
    code, page = report(run)
    assert code == 0
    body = page.cells.index("Run run")
    assert page.cells[body + 2] == "AUDIT PASSED"
    assert (
        page.beside("AUDIT PASSED")
        == "in each of 50 iterations (1 to 50) each of the 16 microbatches was counted exactly once"
    )


def test_each_recovery_is_told_with_its_cause_and_the_time_of_its_phases(run: Path) -> None:
    _, page = report(run)
    first, second = page.table("iteration", "cause", "rerun", "total")
    assert first == {
        "iteration": "20", "epoch": "2", "lost, formed": "workers 5; replicas 2",
        "cause": "worker 5 on node1: SIGKILL (chaos: kill)", "survivors in": "backward", "replicas after": "3",
        "run again": "4", "detect": "3.0", "rendezvous": "16.0", "regroup": "20.0", "pull": "5.0", "rerun": "85.0",
        "reduce": "20.0", "agree": "4.0", "total": "150.0",
    }  # fmt: skip
    assert second["cause"] == "worker 1 on node1: no progress & <b>silent</b> (chaos: stop)"
    assert (second["iteration"], second["detect"], second["total"]) == ("33", "2,500.0", "160.0")
    assert page.beside("2 workers lost") == "in 2 recoveries"
    assert page.beside("0.31 s recovering").startswith("median 155 ms each, 2.10% of the iterations")  # of 14.77 s


def test_what_came_over_the_network_is_escaped(run: Path) -> None:
    report(run)
    assert "<b>silent" not in (run / "report.html").read_text()


def test_the_page_needs_nothing_outside_and_shows_the_pictures_that_lie_beside_it(run: Path) -> None:
    pytest.importorskip("matplotlib")
    _, page = report(run)
    names = ["report-loss.png", "report-replicas.png", "report-recoveries.png", "report-throughput.png"]
    assert [base64.b64decode(src.split(",")[1]) for src in page.images] == [(run / name).read_bytes() for name in names]
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert not re.search(r"https?://|src=\"(?!data:)|<script", (run / "report.html").read_text())


def test_the_largest_difference_from_the_reference_is_stated(run: Path, tmp_path: Path, capsys) -> None:
    reference = write_steps(tmp_path / "reference", steps(deaths={}))
    code, page = report(run, "--reference", reference)
    assert code == 0
    assert page.beside("equal") == "loss equal in all digits; 50 iterations compared with the reference"
    noisy = write_run(tmp_path / "noisy", noise=3e-7)
    code, page = report(noisy, "--reference", reference)
    assert code == 0
    assert page.beside("3.00e-07").startswith("largest relative difference of the loss, in iteration 41 (2.")
    assert "largest relative difference of the loss 3.00e-07, in iteration 41; 50 iterations" in capsys.readouterr().out


def test_a_loss_that_no_rounding_explains_and_other_samples_end_with_1(tmp_path: Path, capsys) -> None:
    reference = write_steps(tmp_path / "reference", good := steps(deaths={}))
    strange = [dataclasses.replace(step, loss=step.loss * 1.2) if step.iteration > 47 else step for step in good]
    drifted = write_steps(tmp_path / "drifted", strange)
    assert main([str(drifted), "--reference", str(reference)]) == 1
    told = (
        "the loss differs from the reference by more than rounding in iteration 48, and in 2 later iterations: "
        f"{strange[47].loss!r}, {good[47].loss!r} in the reference, a relative difference of 2.0e-01 (limit 1.0e-02)"
    )
    assert told in capsys.readouterr().err
    assert told in (drifted / "report.html").read_text()
    assert main([str(drifted)]) == 0
    later = [*good[:-1], dataclasses.replace(good[-1], consumed_samples=good[-1].consumed_samples + 1)]
    assert main([str(write_steps(tmp_path / "later", later)), "--reference", str(reference)]) == 1
    assert "samples were consumed by its end" in capsys.readouterr().err


def drifting(made: list[StepRecord], off: dict[int, float]) -> list[StepRecord]:
    """The same steps, from each of these iterations on with losses that are so far off."""
    return [
        dataclasses.replace(step, loss=step.loss * (1 + max((off[n] for n in off if n <= step.iteration), default=0)))
        for step in made
    ]


@pytest.mark.parametrize(
    ("off", "tolerance", "iteration"),
    [
        ({20: 3.2e-4}, TOLERANCE, 20),
        ({20: 1.2e-7, 24: 3.2e-4}, TOLERANCE, 24),
        ({21: 9e-5, 40: 3e-4}, TOLERANCE, None),
        ({20: 3.2e-4}, 1e-3, None),
        ({20: 6e-5}, 1e-5, 20),
        ({1: 5e-4, 20: 2e-3}, TOLERANCE, None),
        ({1: 5e-5, 20: 6e-3}, TOLERANCE, 20),
    ],
    ids=["in the step", "after it", "rounding grows", "more is allowed", "less is", "it differed before", "far less"],
)
def test_a_loss_that_leaves_the_reference_right_after_a_death_is_an_error(
    off: dict[int, float], tolerance: float, iteration: int | None
) -> None:
    found = compare(drifting(steps(), off), steps(deaths={}), tolerance).unlike
    assert len(found) == (iteration is not None)
    assert all(f"more than rounding in iteration {iteration}, and in" in text for text in found)


def test_how_far_a_loss_may_leave_the_reference_is_said_by_a_flag(tmp_path: Path, capsys: Any) -> None:
    reference = write_steps(tmp_path / "reference", steps(deaths={}))
    argv = [str(write_steps(tmp_path / "mine", drifting(steps(), {20: 3.2e-4}))), "--reference", str(reference)]
    assert main(argv) == 1
    assert "rounding in iteration 20, and in 9 later iterations" in capsys.readouterr().err
    assert main([*argv, "--tolerance", "1e-3"]) == 0
    start = {"event": "start", "time": T0, "worker": 0, "iteration": 1, "argv": ["--bf16"]}
    write_lines(tmp_path / "mine" / "events.jsonl", [start])
    assert main(argv) == 1, "the parameters of iteration 20 are the same"
    later = write_steps(tmp_path / "mine", drifting(steps(), {21: 3.2e-4}))
    assert main(argv) == 0
    for bits, code in ((16, 0), (32, 1)):  # a recipe or a file may say it, and no flag
        write_lines(later / "events.jsonl", [{**start, "argv": [], "bits": bits}])
        assert main(argv) == code
    (later / "events.jsonl").unlink()
    assert main(argv) == 1
    for refused in ([*argv, "--tolerance", "1.5"], [argv[0], "--tolerance", "0.1"]):
        with pytest.raises(SystemExit, match="2"):
            main(refused)
        assert "--tolerance: give a number from 0 to 1, with --reference DIR2" in capsys.readouterr().err


def test_other_samples_than_the_reference_are_refused(run: Path, tmp_path: Path, capsys) -> None:
    shifted = [dataclasses.replace(s, consumed_samples=s.consumed_samples + 32) for s in steps(deaths={})]
    reference = write_steps(tmp_path / "reference", shifted)
    assert main([str(run), "--reference", str(reference)]) == 2
    told = "another batch size: 64 samples consumed by the end of iteration 1, 32 in this run"
    assert f"--reference {reference} is not a run of the same training: {told}" in capsys.readouterr().err
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"microbatches": {0: [0, 1, 2]}}, "another batch size: 3 microbatches in iteration 1"),
        ({"loss": 9.0}, "other data, or another model or seed: the loss of iteration 1 is 9.0"),
        ({"iteration": 1000}, "it has no iteration in common with this run"),
        ({"loss": steps()[0].loss * (1 + 1e-5)}, ""),
        ({"loss": None}, ""),
    ],
)
def test_a_reference_of_another_training_is_known(change: dict, told: str) -> None:
    mine = steps()[:1]
    why = unfit(mine, [dataclasses.replace(step, **change) for step in mine])
    assert why.startswith(told)
    assert bool(why) == bool(told)


def test_who_ran_what_around_a_loss_checkpoints_and_versions_are_told(run: Path) -> None:
    path = run / "events.jsonl"
    start, *more = path.read_text().splitlines()
    told = {"argv": ["--lr", "1e-3", "a b"], "versions": {"torch": "2.13.0"}, "tokens_per_sample": 100}
    saved = {"event": "checkpoint", "time": T0 + 30, "worker": 0, "saved": 25, "folder": "/ckpt"}
    lines = [json.dumps(json.loads(start) | told), *more, json.dumps(saved)]
    path.write_text("".join(line + "\n" for line in lines))
    _, page = report(run)
    assert ["20 (workers lost)", "1", ids_in_runs(steps()[19].microbatches[1])] in page.rows
    assert [row[1] for row in page.rows if row[:1] == ["21"]] == ["0", "1", "3"]
    assert ["25", "2023-11-14 22:13:50 UTC", "/ckpt"] in page.rows
    assert ["command line", "--lr 1e-3 'a b'"] in page.rows
    assert ["versions", "torch 2.13.0"] in page.rows
    assert page.beside("16,000 tokens/s") == "median with 4 replicas"


def test_ids_are_written_in_short() -> None:
    assert ids_in_runs([4, 0, 9, 8, 10, 2, 1, 12, 13]) == "0-2, 4, 8-10, 12, 13"
    assert ids_in_runs([]) == ""


def test_a_page_of_a_run_that_goes_on_loads_itself_again(run: Path) -> None:
    report(run)
    assert "http-equiv" not in (run / "report.html").read_text()
    for name in ("events.jsonl", "events-0.jsonl"):
        kept = [
            line for line in (run / name).read_text().splitlines(True) if '"end"' not in line and '"stop"' not in line
        ]
        (run / name).write_text("".join(kept))
    report(run)
    assert '<meta http-equiv="refresh" content="30">' in (run / "report.html").read_text()


def test_a_lost_microbatch_is_a_failed_audit(run: Path) -> None:
    bad = steps()
    bad[29] = dataclasses.replace(bad[29], microbatches={0: list(range(15))})
    write_steps(run, bad)
    code, page = report(run)
    assert code == 1
    assert "AUDIT PASSED" not in page.cells
    assert page.beside("AUDIT FAILED") == "iteration 30: microbatches [15] were not counted"


def test_a_run_that_stopped_early_says_why(run: Path) -> None:
    stopped = [e for e in coordinator_events() if e["event"] != "stop"]
    reason = "no replica is whole <any more>"
    fault = {"event": "fault", "time": T0 + 60, "kind": "dead", "worker": 3, "host": "n", "reason": "SIGBUS"}
    stop = {"event": "stop", "time": T0 + 61, "mono": 9.0, "code": 10, "reason": reason}
    write_lines(run / "events-0.jsonl", [*stopped, fault, stop])
    code, page = report(run)
    assert code == 0
    assert page.beside("ENDED EARLY") == f"stopped with exit code 10: {reason}"
    last = history(worker_events(), [*stopped, fault, stop], []).recoveries[-1]
    assert (last.epoch, last.lost_workers, last.causes) == (None, (3,), ("worker 3 on n: SIGBUS",))


def test_throughput_is_told_by_the_number_of_replicas(run: Path) -> None:
    _, page = report(run)
    rows = page.table("replicas", "samples/s, median")
    assert [list(row.values()) for row in rows] == [
        ["4", "18", "0.2000", "160.0", "100%", "100%"],
        ["3", "12", "0.2667", "120.0", "75%", "75%"],
        ["2", "17", "0.4000", "80.0", "50%", "50%"],
    ]
    assert page.beside("160.0 samples/s") == "median with 4 replicas"


def test_a_short_run_has_whole_iterations_on_its_axes(tmp_path: Path) -> None:
    drawn = []

    def draw(axes: Sequence[Any]) -> None:
        axes[0].plot([1, 2, 3, 4, 5], [5.0, 4.0, 3.5, 3.2, 3.1])
        axes[0].set(xlabel="iteration")
        drawn.append(axes[0])

    assert plot.save(tmp_path / "loss.png", draw, [4.5])
    assert all(tick == int(tick) for tick in drawn[0].get_xticks())


def test_other_changes_are_listed(run: Path) -> None:
    _, page = report(run)
    rows = [(row["iteration"], row["change"], row[""]) for row in page.table("iteration", "change")]
    assert rows == [
        ("33", "checkpoint abandoned", "a worker that was writing it in the background was lost"),
        ("40", "quotas balanced", "1: 6, 3: 10"),
        ("46", "checkpoint", "repeated by the remaining workers"),
    ]


def test_a_run_without_events_is_reported_by_its_steps(tmp_path: Path) -> None:
    code, page = report(write_steps(tmp_path / "bare", steps()))
    assert code == 0
    assert "No fault was recorded." in page.cells
    assert page.beside("no end") == "no end was recorded: the run continues, or all its processes were killed"


def test_the_recoveries_of_the_workers_alone_and_of_the_coordinator_alone(tmp_path: Path) -> None:
    alone = history(worker_events(), [], []).recoveries
    assert [(r.iteration, r.lost_workers, r.total, "detect" in r.seconds) for r in alone] == [
        (20, (5,), 0.15, False), (33, (1,), 0.16, False),
    ]  # fmt: skip
    told = history([], coordinator_events(), chaos_events()).recoveries
    assert [r.iteration for r in told] == [20, 33]
    assert [(r.epoch, r.lost_workers, dict(r.seconds), r.total) for r in told] == [
        (2, (5,), {"detect": pytest.approx(0.003, abs=1e-6), "rendezvous": 0.011}, 0.011),
        (3, (1,), {"detect": pytest.approx(2.5), "rendezvous": 0.011}, 0.011),
    ]


def test_of_several_accounts_of_a_phase_the_longest_counts() -> None:
    plans = [event for event in worker_events() if event["event"] == "plan"]
    for events in (plans, plans[::-1]):
        told = history(sorted(events, key=lambda e: e["time"]), [], []).recoveries
        assert dict(told[0].seconds) == {"rendezvous": 0.016, "regroup": 0.02}


def test_several_deaths_before_one_plan_are_one_recovery() -> None:
    events = coordinator_events()
    first = next(n for n, e in enumerate(events) if e["event"] == "fault")
    second = {**events[first], "time": events[first]["time"] + 0.0005, "worker": 6, "reason": "SIGSEGV"}
    told = history(worker_events(), [*events[: first + 1], second, *events[first + 1 :]], []).recoveries
    assert told[0].lost_workers == (5, 6)
    assert told[0].causes == ("worker 5 on node1: SIGKILL", "worker 6 on node1: SIGSEGV")
    assert len(told) == 2


def test_epochs_of_two_launches_into_one_folder_are_kept_apart(run: Path) -> None:
    def later(events):
        return [{**event, "time": event["time"] + 1000} for event in events]

    write_lines(run / "events.jsonl", worker_events() + later(worker_events()))
    write_lines(run / "events-0.jsonl", coordinator_events() + later(coordinator_events()))
    standby = [{"event": "listening", "time": T0 - 1.9, "mono": 1.1, "world": 8}]
    write_lines(run / "events-1.jsonl", standby + later(standby))
    past = history(*read_run_events(run))
    assert past.launches == 2, "each of two candidates says that it listens"
    assert [(r.launch, r.epoch, r.iteration) for r in past.recoveries] == [
        (0, 2, 20),
        (0, 3, 33),
        (1, 2, 20),
        (1, 3, 33),
    ]
    assert past.workers_lost == 4
    workers_only = history(worker_events() + later(worker_events()), [], [])
    assert [(r.launch, r.epoch) for r in workers_only.recoveries] == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_a_loss_that_is_no_number_differs_from_one_that_is() -> None:
    good = steps(3, {})
    nan = [dataclasses.replace(good[0], loss=float("nan")), dataclasses.replace(good[1], loss=None), good[2]]
    one_sided = compare(nan, good)
    assert one_sided.worst_loss is not None
    assert (one_sided.worst_loss.iteration, one_sided.worst_loss.relative) == (1, float("inf"))
    assert one_sided.unlike == [
        "iteration 2: only this run skipped the step",
        "the loss differs from the reference by more than rounding in iteration 1: nan, "
        f"{good[0].loss!r} in the reference, a relative difference of inf (limit 1.0e-02)",
    ]
    both = compare(nan, nan)
    assert both.worst_loss is not None
    assert (both.iterations, both.worst_loss.relative, both.unlike) == (3, 0.0, [])
    assert compare(good, []).worst_loss is None


def test_rates_leave_out_what_cannot_be_known() -> None:
    assert rates(steps(1, {})) == []
    assert rates(steps(3, {})) == [(n, pytest.approx(M * SIZE / 0.2)) for n in (1, 2, 3)]
    gap = [s for s in steps(6, {}) if s.iteration != 3]
    assert [rate for _, rate in rates(gap)] == [pytest.approx(160)] * 5
    assert levels([]) == []


def test_without_matplotlib_the_page_has_all_but_the_pictures(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    code, page = report(run)
    assert code == 0
    assert page.images == []
    assert "No pictures: matplotlib is not installed (pip install 'recover-megatron[plot]')." in page.cells
    assert len(page.table("iteration", "cause")) == len(DEATHS)
    (run / "steps.jsonl").write_text("")
    assert "No pictures: the run has committed no step yet." in report(run)[1].cells


def test_the_page_goes_where_it_was_told_to(run: Path, tmp_path: Path, capsys) -> None:
    assert main([str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "AUDIT PASSED" in html.unescape((tmp_path / "page.html").read_text())
    assert not (run / "report.html").exists()
    assert main([str(run), "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "--out" not in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))
    (run / "report.html").mkdir()  # as good as a folder that may not be written
    assert main([str(run)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"recover-report: error: cannot write {run / 'report.html'}: ")
    assert told.endswith("; choose another file for the page with --out FILE\n")


@pytest.mark.parametrize("line", ['{"event": "plan", "time": 1}', '{"event": "fault", "time": 2}'])
def test_an_event_against_the_schema_is_an_error_without_a_traceback(run: Path, capsys, line: str) -> None:
    with (run / "events-0.jsonl").open("a") as file:
        file.write(line + "\n")
    assert main([str(run)]) == 2
    assert capsys.readouterr().err.startswith("recover-report: error: ")


def test_spoiled_lines_are_named_on_the_page_and_an_iteration_without_a_line_passes_no_audit(run: Path, capsys) -> None:
    for name in ("events.jsonl", "events-0.jsonl"):
        with (run / name).open("ab") as file:
            file.write(bytes(300) + b"\n")
    code, page = report(run)
    assert code == 0
    assert page.beside("AUDIT PASSED").startswith("in each of 50 iterations")
    assert "events.jsonl:" in page.beside("LEFT OUT")
    assert "events-0.jsonl:" in page.beside("LEFT OUT")
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").write_bytes(b"".join([*lines[:6], bytes(len(lines[6]) - 1) + b"\n", *lines[7:]]))
    code, page = report(run)
    assert code == 1
    assert "AUDIT PASSED" not in page.cells
    assert page.beside("AUDIT INCOMPLETE").startswith("iteration 7 is not shown")
    assert main([str(run), "--trace", str(run / "trace.json")]) == 0
    assert "left out: 2 damaged lines" in capsys.readouterr().out


def test_what_is_no_run_is_told_without_a_traceback(tmp_path: Path, run: Path, capsys) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(run), "--reference", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    code, page = report(write_steps(tmp_path / "empty", []))
    assert code == 0
    assert page.beside("NOTHING TO AUDIT") == "no iteration was committed"


def test_who_loads_the_page_while_it_is_written_anew_gets_a_whole_one(run: Path) -> None:
    report(run)
    with (run / "report.html").open() as opened:  # as a browser has it
        (run / "steps.jsonl").write_text("".join((run / "steps.jsonl").read_text().splitlines(keepends=True)[:30]))
        report(run)
        assert "in each of 50 iterations" in opened.read()
    assert "iterations 31 to 50 are not shown" in (run / "report.html").read_text(), (
        "the events tell of an end after 50"
    )
    assert not list(run.glob(".*"))


def test_a_page_may_go_where_nothing_can_be_replaced(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.symlink_to("/dev/null")
    assert main([str(run), "--out", str(page)]) == 0
    assert page.is_symlink()
