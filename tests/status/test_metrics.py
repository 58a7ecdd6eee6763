"""What monitoring gets of a run: metrics, and a command for events that nobody waits for."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from recover_megatron.status.exporter import EventHook
from recover_megatron.status.folder import History
from recover_megatron.status.headline import Headline, Level, headline
from recover_megatron.status.metrics import RunCollector
from recover_megatron.status.model import read
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE
from tests.status.test_folder import BEGUN, event, history_of, start, steps
from tests.status.test_status_model import GRID, seen, text

OBSERVABILITY = REPOSITORY / "examples" / "observability"


def samples(collector: RunCollector) -> dict[tuple[str, ...], float]:
    """(name, values of the labels) -> value, as Prometheus reads them."""
    families = text_string_to_metric_families(generate_latest(collector.registry()).decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


@pytest.fixture
def collector(tmp_path: Path) -> RunCollector:
    start(tmp_path)
    steps(tmp_path, 1, 20)
    event(tmp_path, "plan", BEGUN + 5, lost_replicas=[2], lost_workers=[4])
    event(tmp_path, "recovery", BEGUN + 6, reran={"0": [1, 2]}, seconds={"rendezvous": 0.02, "rerun": 2.0})
    history = history_of(tmp_path)
    collector = RunCollector(history)
    gone = {"worker": 5, "fate": "dead", "host": "h", "why": "its process has ended (SIGKILL)", "ago": 2.0}
    collector.put(seen(workers=[*GRID[:4], gone]).with_files(history.training(BEGUN + 20), {}))
    return collector


def test_a_degraded_run_is_told_in_numbers(collector: RunCollector) -> None:
    told = samples(collector)
    assert told["recover_coordinator_up",] == 1
    assert told["recover_state", "DEGRADED"] == 1
    assert told["recover_state", "HEALTHY"] == 0
    assert (told["recover_replicas",], told["recover_replicas_of_launch",]) == (2, 3)
    assert told["recover_workers_lost_total", "killed"] == 1
    assert (told["recover_iteration",], told["recover_recoveries_total",]) == (20, 1)
    assert told["recover_microbatches_rerun_total",] == 2
    assert told["recover_goodput_ratio",] == pytest.approx((10 - 2.02) / 20)
    buckets = {le: value for (name, *labels), value in told.items() if "seconds_bucket" in name
               for le in labels if "rerun" in labels and le != "rerun"}  # fmt: skip
    assert (buckets["1.0"], buckets["3.0"], buckets["+Inf"]) == (0, 1, 1)


def test_who_is_aside_and_what_is_being_drained_is_counted_and_no_loss(tmp_path: Path) -> None:
    aside = [{"worker": n, "fate": "aside", "host": "h", "why": "set aside, and may come back: late"} for n in (4, 5)]
    states = {"a": "asked", "b": "moving", "c": "drained", "d": "refused"}
    drains = [{"node": node, "state": state, "workers": [], "names": [node]} for node, state in states.items()]
    collector = RunCollector(History(tmp_path))
    collector.put(status := seen(workers=[*GRID[:4], *aside], drains=drains))
    told = samples(collector)
    assert (told["recover_workers_aside",], told["recover_nodes_draining",]) == (2, 2)
    assert not any(name == "recover_workers_lost_total" for name, *_ in told)
    word = "DEGRADED 2/3 replicas, workers 4, 5 set aside, nodes a, b being drained"
    assert headline(status) == Headline("DEGRADED", word, Level.WARNING)
    assert re.search(r"4 +h +aside .*set aside, and may come back: late", text(status))
    assert re.search(r"b +being drained", text(status))
    collector.put(seen())
    told = samples(collector)
    assert (told["recover_workers_aside",], told["recover_nodes_draining",]) == (0, 0)


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
    manual = (REPOSITORY / "docs" / "metrics.md").read_text()
    for name in names:
        base = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        assert f"`{base}`" in manual or f"`{base.removesuffix('_created')}`" in manual, name


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


def test_the_last_numbers_of_a_run_that_has_ended_raise_no_alert_but_that_on_its_exit_code(tmp_path: Path) -> None:
    # A textfile keeps them for ever.  An alert whose metrics are all among them has to ask whether the run has ended.
    start(tmp_path)
    steps(tmp_path, 1, 20)
    event(tmp_path, "checkpoint", BEGUN + 5, saved=10, folder="f")
    history = history_of(tmp_path)
    collector = RunCollector(history)
    ended = read({"type": "stop", "code": 0, "reason": "all workers have left", "epoch": 1}, "logs")
    collector.put(ended.with_files(history.training(BEGUN + 90), {}))
    told = samples(collector)
    assert told["recover_state", "ENDED"] == 1
    kept = {name for name, *_ in told} - {"recover_coordinator_up", "recover_exit_code"}
    rules = re.findall(r"^ +expr: (.+)$", (OBSERVABILITY / "alerts.yaml").read_text(), re.MULTILINE)
    stale = [rule for rule in rules if set(re.findall(r"recover_\w+", rule)) <= kept and not re.search(_FALLS, rule)]
    assert len(stale) == 3
    assert all('recover_state{state="ENDED"} == 0' in rule for rule in stale)


_FALLS = r"STALLED|aside|draining|increase"
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
    for command, complaint in (("false", "false ended with 1"), ("/no/such/command", "/no/such/command cannot be run")):
        hook = EventHook(command, complaints.append)
        hook.put({})
        hook.close(DEADLINE)
        assert complaint in complaints[-1]
