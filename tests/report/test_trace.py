"""The recoveries of a run in the Chrome trace format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recover_megatron.report.full import main
from recover_megatron.report.lanes import trace

AT = 1_700_000_000.0
WORKERS = [
    {"event": "start", "time": AT, "iteration": 1},
    {"event": "plan", "time": AT + 10.1, "iteration": 7, "epoch": 2, "lost_workers": [1], "grid": {"0": [0]}},
    {"event": "recovery", "time": AT + 11, "iteration": 7, "epoch": 2, "seconds": {"rendezvous": 0.5, "rerun": 0.25}},
]
COORDINATOR = [
    {"event": "fault", "time": AT + 10, "worker": 1, "kind": "dead", "file": "events-0.jsonl"},
    {"event": "revoke", "time": AT + 10.01, "epoch": 2, "file": "events-0.jsonl"},
    {"event": "plan", "time": AT + 10.1, "epoch": 2, "file": "events-0.jsonl"},
]


def test_phases_lie_behind_each_other_within_their_recovery_and_a_rendezvous_is_a_span() -> None:
    made = {entry["name"]: entry for entry in trace(WORKERS, COORDINATOR)["traceEvents"] if entry["ph"] != "M"}
    recovery, first, second = (made[name] for name in ("recovery in iteration 7", "rendezvous", "rerun"))
    assert (recovery["dur"], first["dur"], second["dur"]) == (750_000, 500_000, 250_000)
    assert recovery["ts"] == first["ts"] == round((AT + 10.25) * 1e6)
    assert second["ts"] == first["ts"] + first["dur"]
    meeting = made["rendezvous of epoch 2"]
    assert (meeting["ts"], meeting["dur"]) == (round((AT + 10.01) * 1e6), 90_000)
    assert made["fault of worker 1"]["ph"] == "i"
    assert meeting["tid"] == made["fault of worker 1"]["tid"] != recovery["tid"]


def test_the_command_writes_the_file_alone_and_a_folder_without_events_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert main([str(tmp_path), "--trace", str(out)]) == 2
    assert "no events of a run" in capsys.readouterr().err
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in WORKERS))
    assert main([str(tmp_path), "--trace", str(out)]) == 0
    assert {entry["name"] for entry in json.loads(out.read_text())["traceEvents"]} >= {"start", "rerun"}
    assert not (tmp_path / "report.html").exists()
