"""The fork server's own promise: spares and replacements join the run, under ids that were never used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer


def said(folder: Path, worker: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"worker-{worker}.log").read_text().splitlines() if line[:1] == "{"]


def test_spares_and_one_in_place_of_each_that_ended_join_the_run(forkserver: ForkServer, tmp_path: Path) -> None:
    script = str(REPOSITORY / "tests" / "agreeing.py")
    argv = [script, "10", "0.05", "--recover", "--recover-heartbeat-interval", "0.5"]
    strikes = json.dumps([[1, 10, "kill"], [4, 0, 7]])  # the first one started in place of another fails, too
    environment = {"AGREEING_STRIKES": strikes, "AGREEING_AWAITS": "[3, 5]"}
    nodes = ["a", "b", "c"]
    run = forkserver.run(3, argv, tmp_path, environment=environment, spares=1, restarts=2, nodes=nodes)
    assert run.codes == [0, -9, 0], run.tail()
    assert run.more == {3: 0, 4: 7, 5: 0}, run.tail()
    spare, first, second = (said(tmp_path, worker) for worker in (3, 4, 5))
    assert spare[0] | {"pid": 0} == {
        "event": "starts", "worker": 3, "pid": 0, "RANK": "0", "LOCAL_RANK": "3", "WORLD_SIZE": "3",
        "RECOVER_JOIN": "1", "RECOVER_SPARE": "1", "RECOVER_REPLACED": "1", "RECOVER_NODE_NAME": "c",
    }  # fmt: skip
    for successor in (first, second):
        assert (successor[0]["RANK"], successor[0]["RECOVER_NODE_NAME"]) == ("1", "b")
        assert "RECOVER_SPARE" not in successor[0]
    plans = [line["members"] for line in said(tmp_path, 0) if line["event"] == "plan"]
    assert plans[-1] == [0, 2, 3, 5]
    assert [4 in line["members"] for line in first if line["event"] == "plan"] == [True], "it was in the run"


def test_who_comes_when_the_run_is_over_is_ended(forkserver: ForkServer, tmp_path: Path) -> None:
    script = str(REPOSITORY / "tests" / "agreeing.py")
    environment = {"AGREEING_STRIKES": json.dumps([[0, 3, "kill"]]), "AGREEING_LATE": "1"}
    environment["AGREEING_UNTIL"] = str(tmp_path / "go")  # made by the one that comes
    run = forkserver.run(2, [script, "10", "0.1", "--recover"], tmp_path, environment=environment, restarts=1)
    assert run.codes == [-9, 0]
    assert run.more == {2: -9}
