"""What monitoring gets of a run: metrics, and a command for events that nobody waits for."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from recover_megatron.membership.messages.to_member import Stop
from recover_megatron.status import metrics
from recover_megatron.status.exporter import MOST, EventHook, Exporter
from recover_megatron.status.folder import History
from recover_megatron.status.headline import Headline, Level, headline
from recover_megatron.status.metrics import RunCollector
from recover_megatron.status.model import CAUSES, read
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE
from tests.status.test_folder import BEGUN, event, history_of, start, steps
from tests.status.test_status_model import GRID, row, seen, text

OBSERVABILITY = REPOSITORY / "examples" / "observability"
RUN = "/logs/a"


def samples(collector: RunCollector) -> dict[tuple[str, ...], float]:
    """(name, values of the labels but ``run``) -> value, as Prometheus reads them."""
    families = text_string_to_metric_families(generate_latest(collector.registry()).decode())
    told = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        assert labels.pop("run") == RUN, sample
        told[sample.name, *labels.values()] = sample.value
    return told


def lost(worker: int, why: str, ago: float = 2.0, fate: str = "dead") -> dict[str, object]:
    return {"worker": worker, "fate": fate, "host": "h", "why": why, "ago": ago}


@pytest.fixture
def collector(tmp_path: Path) -> RunCollector:
    start(tmp_path)
    steps(tmp_path, 1, 20)
    event(tmp_path, "plan", BEGUN + 5, lost_replicas=[2], lost_workers=[4])
    event(tmp_path, "recovery", BEGUN + 6, reran={"0": [1, 2]}, seconds={"rendezvous": 0.02, "rerun": 2.0})
    history = history_of(tmp_path)
    collector = RunCollector(history, RUN)
    gone = lost(4, "its process has ended (SIGKILL)")
    collector.put(seen(workers=[*GRID[:4], gone]).with_files(history.training(BEGUN + 20), {}))
    return collector


def test_a_degraded_run_is_told_in_numbers(collector: RunCollector) -> None:
    told = samples(collector)
    assert told["recover_coordinator_up",] == 1
    assert told["recover_state", "DEGRADED"] == 1
    assert told["recover_state", "HEALTHY"] == 0
    assert (told["recover_replicas",], told["recover_replicas_of_launch",]) == (2, 3)
    assert told["recover_workers_lost_total", "killed"] == 1
    assert (told["recover_iteration",], told["recover_recoveries_total", "killed"]) == (20, 1)
    assert (told["recover_workers_lost_total", "hang"], told["recover_recoveries_total", "hang"]) == (0, 0)
    assert told["recover_microbatches_rerun_total",] == 2
    assert told["recover_goodput_ratio",] == pytest.approx((10 - 2.02) / 20)
    buckets = {le: value for (name, *labels), value in told.items() if "seconds_bucket" in name
               for le in labels if "rerun" in labels and le != "rerun"}  # fmt: skip
    assert (buckets["1.0"], buckets["3.0"], buckets["+Inf"]) == (0, 1, 1)


def test_who_is_aside_and_what_is_being_drained_is_counted_and_no_loss(tmp_path: Path) -> None:
    aside = [{"worker": n, "fate": "aside", "host": "h", "why": "set aside, and may come back: late"} for n in (4, 5)]
    states = {"a": "asked", "b": "moving", "c": "drained", "d": "refused"}
    drains = [{"node": node, "state": state, "workers": [], "names": [node]} for node, state in states.items()]
    event(tmp_path, "plan", time.time(), lost_replicas=[2], lost_workers=[4])
    collector = RunCollector(history_of(tmp_path), RUN)
    collector.put(status := seen(workers=[*GRID[:4], *aside], drains=drains))
    told = samples(collector)
    assert (told["recover_workers_aside",], told["recover_nodes_draining",]) == (2, 2)
    assert not any(value for (name, *_), value in told.items() if name == "recover_workers_lost_total")
    assert told["recover_recoveries_total", "aside"] == 1
    word = "DEGRADED 2/3 replicas, workers 4, 5 set aside, nodes a, b being drained"
    assert headline(status) == Headline("DEGRADED", word, Level.WARNING)
    assert re.search(r"4 +h +aside .*set aside, and may come back: late", text(status))
    assert re.search(r"b +being drained", text(status))
    collector.put(seen())
    told = samples(collector)
    assert (told["recover_workers_aside",], told["recover_nodes_draining",]) == (0, 0)
    assert told["recover_recoveries_total", "aside"] == 1  # it keeps the cause that it was counted with


def test_a_loss_is_counted_once_under_the_cause_that_it_turns_out_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event(tmp_path, "plan", time.time(), lost_replicas=[2], lost_workers=[4, 5])
    collector = RunCollector(history := history_of(tmp_path), RUN)

    def counted(*gone: dict[str, object], **told: object) -> dict[str, tuple[float, float]]:
        """By cause, where there are any: workers, recoveries."""
        collector.put(seen(workers=[*GRID[:4], *gone], **told).with_files(history.training(BEGUN + 20), {}))
        values = samples(collector)
        both = {c: tuple(values[f"recover_{n}_total", c] for n in ("workers_lost", "recoveries")) for c in CAUSES}
        return {cause: (workers, recoveries) for cause, (workers, recoveries) in both.items() if workers or recoveries}

    closed = "its connection failed"
    assert counted(lost(4, closed), lost(5, closed)) == {}  # how they have ended will be told
    killed = {"killed": (1, 1)}
    assert counted(lost(4, f"{closed}; its process has ended (SIGKILL)"), lost(5, closed)) == killed
    assert counted(lost(4, "", 9.0), lost(5, closed, 9.0)) == killed  # a coordinator that took over does not know why
    assert counted(lost(4, "", 11.0), lost(5, closed, 11.0)) == {"killed": (1, 1), "ended": (1, 0)}
    out = lost(6, "makes no progress: no progress", fate="out")
    event(tmp_path, "plan", time.time() - 3600, lost_replicas=[1], lost_workers=[6])  # by another host's clock
    event(tmp_path, "plan", time.time() - 3600, lost_replicas=[0], lost_workers=[0])  # nobody ever says why
    history.read()
    told = {"killed": (1, 1), "ended": (1, 0), "hang": (1, 1)}
    assert counted(out, lost(4, "", 60.0), lost(5, closed, 60.0)) == told
    monkeypatch.setattr(metrics, "NAMED_SECONDS", 0.0)
    assert counted(out, lost(4, "", 60.0), lost(5, closed, 60.0)) == {**told, "ended": (1, 1)}


def test_a_run_of_the_library_has_the_numbers_that_alerts_ask_for(tmp_path: Path) -> None:
    """It writes no steps.jsonl, and its plans tell of no replicas: each worker counts as one."""
    workers = [row(n, iteration=7, phase="forward") for n in range(3)]
    dead, left = ({"worker": 2, "fate": fate, "host": "h", "why": "", "ago": 2.0} for fate in ("dead", "left"))

    def told(**fields: object) -> tuple[float | None, ...]:
        collector = RunCollector(History(tmp_path), RUN)
        whole = {"replicas": [], "replica_size": 0, "launched": 3, "world": 3, "live": 3, "workers": workers}
        collector.put(seen(**{**whole, **fields}).with_files(None, {}))
        values = samples(collector)
        return tuple(values.get((f"recover_{name}",)) for name in ("iteration", "replicas", "replicas_of_launch"))

    assert told() == (7, 3, 3)
    assert told(live=2, workers=[*workers[:2], dead]) == (7, 2, 3)
    assert told(live=2, workers=[*workers[:2], left]) == (7, 2, 2)
    assert told(epoch=0) == (None, 0, None)


@pytest.mark.parametrize(("newest", "wanted", "shown"), [(2.25, 2.25, "loss 2.2500"), (None, math.nan, "loss nan")])
def test_of_a_run_of_the_library_the_loss_is_that_of_the_newest_step_that_a_worker_tells(
    tmp_path: Path, newest: float | None, wanted: float, shown: str
) -> None:
    losses = [[6, 2.5], [7, newest], None]
    workers = [row(n, iteration=8, **({"loss": loss} if loss else {})) for n, loss in enumerate(losses)]
    status = seen(replicas=[], replica_size=0, launched=3, world=3, live=3, workers=workers)
    collector = RunCollector(History(tmp_path), RUN)
    collector.put(status)
    assert samples(collector)["recover_loss",] == pytest.approx(wanted, nan_ok=True)
    assert shown in text(status)
    collector.put(seen(workers=GRID))
    assert ("recover_loss",) not in samples(collector), "a run without steps.jsonl that tells none"


def test_node_exporter_may_read_the_textfile_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECOVER_SECRET", "one that is long enough")
    made = argparse.Namespace(
        log_dir=tmp_path, coordinators="127.0.0.1:1", on_event="", textfile=tmp_path / "run.prom", port=0, host="",
        end_fd=-1,
    )  # fmt: skip
    exporter = Exporter(made)
    before = os.umask(0o077)
    try:
        exporter._write_textfile()
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.textfile.stat().st_mode) == 0o644
    assert b"recover_coordinator_up" in made.textfile.read_bytes()
    assert list(tmp_path.iterdir()) == [made.textfile]
    made.textfile.unlink()
    made.textfile.mkdir()
    exporter._write_textfile()  # as good as a disk that refuses it
    assert list(tmp_path.iterdir()) == [made.textfile]


def test_restarts_are_told_before_the_first_iteration_but_none_of_an_earlier_run(tmp_path: Path) -> None:
    collector = RunCollector(History(tmp_path), RUN)
    workers = {0: {}, 6: {"replaces": 0}}
    collector.put(seen(world=0, live=0, workers=[]).with_files(None, workers))
    assert not any(name.startswith("recover_restarts") for name, *_ in samples(collector))
    collector.put(seen().with_files(None, workers))
    assert samples(collector)["recover_restarts_total",] == 1


def test_of_a_launch_into_the_folder_of_another_nothing_is_told_that_the_other_has_done(tmp_path: Path) -> None:
    start(tmp_path)
    steps(tmp_path, 1, 20)
    event(tmp_path, "plan", BEGUN + 5, lost_replicas=[2], lost_workers=[4])
    event(tmp_path, "recovery", BEGUN + 6, reran={"0": [1, 2]}, seconds={"rerun": 2.0})
    (history := History(tmp_path)).begin()
    collector = RunCollector(history, RUN)
    history.read()
    collector.put(seen(epoch=0).with_files(history.training(BEGUN + 60), {}))
    told = samples(collector)
    assert ("recover_iteration",) not in told
    assert sum(value for (name, *_), value in told.items() if "recover_rec" in name or "rerun" in name) == 0
    assert history.news == []
    event(tmp_path, "start", BEGUN + 70, iteration=21, replicas=[0, 1], train_iters=30)
    steps(tmp_path, 21, 22)
    history.read()
    collector.put(seen().with_files(history.training(BEGUN + 80), {}))
    assert samples(collector)["recover_iteration",] == 22
    assert [(event["file"], event["event"]) for event in history.news] == [("events.jsonl", "start")]


def test_a_coordinator_that_does_not_answer_is_down_and_its_last_word_stays(collector: RunCollector) -> None:
    collector.put(None)
    told = samples(collector)
    assert told["recover_coordinator_up",] == 0
    assert told["recover_replicas",] == 2


def test_alerts_and_dashboard_ask_for_metrics_that_there_are_and_the_manual_has_them(collector: RunCollector) -> None:
    names = {name for name, *_ in samples(collector)} | {"recover_exit_code", "recover_restarts_total"}
    names |= {"recover_checkpoint_iteration", "recover_checkpoint_age_seconds"}
    asked = re.findall(r"^ +expr: (.+)$", (OBSERVABILITY / "alerts.yaml").read_text(), re.MULTILINE)
    assert len(asked) > 5
    dashboard = json.loads((OBSERVABILITY / "dashboard.json").read_text())
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for name in ("recover_workers_aside", "recover_nodes_draining"):
        assert sum(name in expression for expression in asked) == 2, f"{name}: an alert and a panel"
    for expression in asked:
        words = "".join(c if c.isalnum() or c == "_" else " " for c in expression).split()
        ours = {word for word in words if word.startswith("recover_")}
        assert ours
        assert ours <= names, expression
    manual = tomllib.loads((REPOSITORY / "docs" / "data" / "metrics.toml").read_text(encoding="utf-8"))
    documented = {row[0] for table in manual["table"] for row in table["rows"]}
    for name in names:
        base = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        assert documented & {f"`{base}`", f"`{base.removesuffix('_created')}`"}, name


def test_an_alert_on_two_metrics_with_different_labels_says_which_labels_are_to_match(collector: RunCollector) -> None:
    # Prometheus joins two vectors by all of their labels: without a word on them such a rule never has a result.
    families = text_string_to_metric_families(generate_latest(collector.registry()).decode())
    labels = {sample.name: set(sample.labels) - {"le"} for family in families for sample in family.samples}
    rules = re.findall(r"^ +expr: (.+)$", (OBSERVABILITY / "alerts.yaml").read_text(), re.MULTILINE)
    panels = json.loads((OBSERVABILITY / "dashboard.json").read_text())["panels"]
    seen = 0
    for expression in [*rules, *(target["expr"] for panel in panels for target in panel["targets"])]:
        names = [name for name in re.findall(r"recover_\w+", expression) if name in labels]
        if any(labels[name] != labels[names[0]] for name in names[1:]):
            seen += 1
            assert re.search(r" (on|ignoring)\(", expression), expression
    assert seen


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_prometheus_fires_each_alert_and_clears_it_and_finds_nothing_wrong_with_the_metrics(
    collector: RunCollector,
) -> None:
    rules = Path(__file__).with_name("alerts_test.yaml")
    assert {f'alertname="{name}"' in rules.read_text() for name in ALERTS} == {True}
    tested = subprocess.run(["promtool", "test", "rules", rules], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    text = generate_latest(collector.registry())
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


ALERTS = re.findall(r"- alert: (\w+)", (OBSERVABILITY / "alerts.yaml").read_text())


def test_the_last_numbers_of_a_run_that_has_ended_raise_no_alert_but_that_on_its_exit_code(tmp_path: Path) -> None:
    # A textfile keeps them for ever.  An alert whose metrics are all among them has to ask whether the run has ended.
    start(tmp_path)
    steps(tmp_path, 1, 20)
    event(tmp_path, "checkpoint", BEGUN + 5, saved=10, folder="f")
    history = history_of(tmp_path)
    collector = RunCollector(history, RUN)
    ended = read(Stop("all workers have left", 0, 1), "logs")
    collector.put(ended.with_files(history.training(BEGUN + 90), {}))
    told = samples(collector)
    assert told["recover_state", "ENDED"] == 1
    kept = {name for name, *_ in told} - {"recover_coordinator_up", "recover_exit_code"}
    rules = re.findall(r"^ +expr: (.+)$", (OBSERVABILITY / "alerts.yaml").read_text(), re.MULTILINE)
    stale = [rule for rule in rules if set(re.findall(r"recover_\w+", rule)) <= kept and not re.search(_FALLS, rule)]
    assert len(stale) == 3
    assert all('recover_state{state="ENDED"} == 0' in rule for rule in stale)


_FALLS = r"STALLED|STARTING|aside|draining|increase"
"""Of a run that has ended these are 0, or grow no more."""


def test_the_command_gets_each_event_on_its_stdin(tmp_path: Path) -> None:
    script = tmp_path / "append.py"
    script.write_text(f"import sys; open({str(tmp_path / 'told')!r}, 'a').write(sys.stdin.read())")
    complaints: list[str] = []
    hook = EventHook(f"{sys.executable} {script}", complaints.append)
    for number in range(3):
        hook.put({"event": "recovery", "number": number})
    hook.close(DEADLINE)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [event["number"] for event in told] == [0, 1, 2]
    assert complaints == []


def test_a_command_that_hangs_is_killed_with_its_children_and_one_that_fails_is_told_of() -> None:
    complaints: list[str] = []
    said = threading.Event()

    def say(text: str) -> None:
        complaints.append(text)
        said.set()

    hook = EventHook("sleep 1000", say, seconds=0.2)
    hook.put({"event": "recovery"})
    assert said.wait(DEADLINE)
    assert "sleep took longer than 0.2 s and was killed" in complaints[0]
    hook.close(DEADLINE)
    for command, complaint in (
        ("false", "false exited with code 1"),
        ("/no/such/command", "/no/such/command could not be started: No such file"),
        ("bash -c 'kill -KILL $$'", "bash was killed by signal 9"),
    ):
        told: list[str] = []
        hook = EventHook(command, told.append)
        for _ in range(3):
            hook.put({})
        hook.close(DEADLINE)
        assert len(told) == 1, "what goes wrong with every event is said once"
        assert complaint in told[0]


def test_events_that_come_faster_than_the_command_are_dropped_and_that_is_said_once(tmp_path: Path) -> None:
    complaints: list[str] = []
    (gate := tmp_path / "gate").touch()
    hook = EventHook(f"bash -c 'while [ -e {gate} ]; do sleep 0.05; done'", complaints.append)
    for _ in range(2 * MOST):
        hook.put({})
    hook._events.get_nowait()  # room for one, while all others wait
    hook.put({})
    hook.put({})
    assert [f"{MOST} events wait" in complaint for complaint in complaints] == [True]
    hook.close(0.1)
    assert "bash had not handled all events 0.1 s after the end" in complaints[1]
    gate.unlink()
