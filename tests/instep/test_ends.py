"""How a run ends that cannot go on, and how a worker ends that has only itself to blame."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from recover_megatron.membership.records import EXIT_NO_REPLICA, EXIT_SAME_FAULT
from tests.drawn import EVERYTHING
from tests.harness.forkserver import ForkServer
from tests.harness.processes import mount
from tests.instep.conftest import Runs
from tests.instep.runs import LAYOUTS, SAMPLES, Case, Layout, Result, Strike, check_steps, check_steps_until
from tests.launch.pretrain_struck import __file__ as STRUCK
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY, MOCK, MODEL, SCHEDULE

pytestmark = pytest.mark.slow

DP4 = LAYOUTS[0]
TP2, PP2 = Layout("tp2-dp2", 2, tensor=2), Layout("pp2-dp2", 2, pipeline=2)
ENDS = list(itertools.product([TP2, PP2], ["forward", "agree", "recovery"]))


@pytest.mark.parametrize(
    ("layout", "phase"), ENDS if EVERYTHING else ENDS[::4], ids=lambda part: getattr(part, "name", part)
)
def test_without_a_complete_replica_the_survivors_end_with_10_and_say_what_was_lost(
    runs: Runs, tmp_path: Path, layout: Layout, phase: str
) -> None:
    """Of four workers three are lost: what is left of two replicas goes on as one, until that loses a worker, too."""
    first = 8 if phase == "recovery" else 3
    # At its third forward the mate of a pipeline's first stage, and at its second that of a tensor group, is in the
    # iteration, too: one that had not begun it would tell of the one before.
    second = Strike(0, 0, 8, phase, visit=3 if phase == "forward" else 1)
    case = Case(layout, (Strike(1, 1, first, "backward"), second, Strike(0, 1, 10, "backward")), 12)
    case = case.with_flags("--save", str(tmp_path / "checkpoints"), "--save-interval", "2")
    if phase != "recovery":  # the second is lost when the orphan of the first keeps the state of the last replica
        case = case.patient("7-8:mirrors=1")
    result = runs(case)
    lost = [strike.worker(layout) for strike in case.strikes]
    codes = dict(enumerate(result.ended.codes))
    assert [codes.pop(worker) for worker in lost] == [-9, -9, -9], result.told()
    assert set(codes.values()) == {EXIT_NO_REPLICA}, result.told()
    check_steps_until(result, runs.reference(case), 9)
    told = f"{lost[0]} (iteration 3); {lost[1]} (iteration 8); {lost[2]} (iteration 10)"
    if phase == "recovery":
        told = f"{', '.join(map(str, sorted(lost[:2])))} (iteration 8); {lost[2]} (iteration 10)"
    for worker in codes:
        said = result.log(worker)
        assert f"Workers lost: {told}; alive" in said, said
        assert f"iteration 8 in {tmp_path / 'checkpoints'}" in said, said


@pytest.mark.parametrize("tensor", ["1", "2"])
def test_who_waits_for_the_first_plan_when_another_one_dies_ends_with_10(
    forkserver: ForkServer, tmp_path: Path, tensor: str
) -> None:
    """In train() already, and with nobody who would end it: the run may be started again."""
    argv = [STRUCK, *MODEL, *SCHEDULE, *MOCK, "--recover", "--tensor-model-parallel-size", tensor]
    struck = {"STRUCK_AT": "join", "STRUCK_RANKS": "1", "STRUCK_FOLDER": str(tmp_path)}
    run = forkserver.run(4, argv, tmp_path, environment=struck, timeout=120)
    assert run.codes == [EXIT_NO_REPLICA, -9, EXIT_NO_REPLICA, EXIT_NO_REPLICA], run.tail()
    assert "worker 1 died before the training, which cannot begin without all workers" in run.logs[0].read_text()


@pytest.mark.parametrize("layout", [DP4, PP2], ids=lambda layout: layout.name)
def test_an_exception_of_one_worker_is_told_with_its_traceback_and_the_run_goes_on(runs: Runs, layout: Layout) -> None:
    case = Case(layout, (Strike(1, 0, 3, "forward", "raise", 2),))
    result = runs.check(case)
    worker = case.strikes[0].worker(layout)
    assert "InjectedFault: injected fault" in result.log(worker)
    assert "Traceback" in result.log(worker)
    told = [event for event in result.events if event["event"] == "exception"]
    assert len(told) == 1
    assert (told[0]["worker"], told[0]["iteration"]) == (worker, 3)
    assert "InjectedFault" in str(told[0]["error"])
    assert "Traceback" in str(told[0]["traceback"])
    for other in set(range(layout.grid.world)) - {worker}:
        assert "InjectedFault" not in result.log(other)


def test_an_orphan_with_a_broken_device_ends_as_any_dead_worker_and_the_run_goes_on(runs: Runs) -> None:
    """It does not wait as a spare, which nobody would replace."""
    case = Case(TP2, (Strike(1, 1, 3, "forward"),)).altered("faulty.broken_device")
    result = runs(case)
    struck = case.strikes[0].worker(TP2)
    (mate,) = set(TP2.grid.replicas[1]) - {struck}
    expected = [0, 0, 0, 0]
    expected[struck], expected[mate] = -9, 1
    assert list(result.ended.codes) == expected, result.told()
    assert "its device or CUDA context is broken" in result.log(mate)
    told = [event for event in result.events if event["event"] == "exception"]
    assert [(event["worker"], event["own"]) for event in told] == [(mate, True)]
    check_steps(result, runs.reference(case))


@pytest.mark.parametrize("missing", [False, True], ids=["empty", "missing"])
def test_a_checkpoint_that_megatron_exits_at_without_a_code_ends_the_launch_with_1(
    runs: Runs, tmp_path: Path, missing: bool
) -> None:
    load = tmp_path / "checkpoints"
    load.mkdir()
    if not missing:
        (load / "latest_checkpointed_iteration.txt").touch()
    case = Case(Layout("dp2", 2)).with_flags("--load", str(load), "--exit-on-missing-checkpoint")
    result = runs(case)
    assert result.ended.codes == [1, 1], result.told()
    assert not result.steps
    for worker in range(2):
        last = result.log(worker).splitlines()[-1]
        assert "sys.exit() was called before the end of the training" in last
        assert str(load) in last


ROTTEN = 2 * SAMPLES + 5
"""A sample of iteration 3: microbatch 5."""


POISONS = [
    (DP4, "raise", 0, "sample 29 is rotten"),
    (DP4, "raise", 1, "sample 29 is rotten"),
    (DP4, "exit", 0, "sys.exit() was called before the end of the training, by __getitem__()"),
    (DP4, "nan", 0, "found NaN in local forward loss calculation"),
    (DP4, "gradient", 0, "found NaN in local grad norm"),
    (DP4, "connection", 0, "Connection reset by peer"),
    (TP2, "connection", 0, "Connection reset by peer"),
    (TP2, "transport", 0, "op.preamble.length"),
]


@pytest.mark.parametrize(("layout", "what", "loading", "error"), POISONS, ids=lambda part: getattr(part, "name", part))
def test_a_sample_that_no_worker_survives_ends_the_run_with_its_cause(
    runs: Runs, layout: Layout, what: str, loading: int, error: str
) -> None:
    """``loading``: processes of the data loader; in one the error has another text than on the spot."""
    result, said = poisoned(runs, layout, what, "--num-workers", str(loading))
    victims = [worker for worker in range(4) if "exits after an exception" in said[worker]]
    assert 2 <= len({worker // layout.positions for worker in victims}) <= 3, result.told()
    for worker in victims:
        assert error in said[worker], result.told()
    cause = re.compile(r"microbatch 5 of iteration 3 fails wherever it is run, on .*" + re.escape(error))
    told = [worker for worker in set(range(4)) - set(victims) if cause.search(said[worker])]
    assert told == sorted(set(range(4)) - set(victims)), result.told()
    assert any(cause.search(str(event.get("reason"))) for event in result.events if event["event"] == "stop")


def test_a_sample_that_ends_every_worker_in_other_words_ends_the_run_with_all_of_them(runs: Runs) -> None:
    _, said = poisoned(runs, DP4, "words")
    victims = [worker for worker in range(4) if "exits after an exception" in said[worker]]
    assert len(victims) == 3, said
    (left,) = set(range(4)) - set(victims)
    assert "microbatch 5 of iteration 3 ends every worker that runs it, each with another error" in said[left]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with an end, that of a checkpoint or two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", disk)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize(
    ("form", "replicas", "how"),
    [("torch", 3, ""), ("torch", 1, ""), ("torch_dist", 3, ""), ("torch_dist", 3, ASYNCHRONOUSLY)],
    ids=["torch", "torch-alone", "torch_dist", "torch_dist-asynchronously"],
)
def test_a_full_checkpoint_disk_ends_the_run_with_its_cause_and_the_last_good_checkpoint(
    runs: Runs, small_disk: Path, form: str, replicas: int, how: str
) -> None:
    save = small_disk / "checkpoints"
    case = Case(Layout(f"dp{replicas}", replicas)).with_flags(
        "--save", str(save), "--save-interval", "2", "--ckpt-format", form, *how.split()
    )
    result = runs(case.altered("unwritten.full", small_disk))
    assert set(result.ended.codes) == {EXIT_SAME_FAULT}, result.told()
    (stop,) = [event for event in result.events if event["event"] == "stop"]
    assert stop["code"] == EXIT_SAME_FAULT
    told = f"the checkpoint of iteration 4 cannot be written to {save}: No space left on device"
    assert told in str(stop["reason"])
    assert f"Last complete checkpoint: iteration 2 in {save}" in str(stop["reason"])
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert [path.name for path in save.iterdir() if path.name.startswith("iter_")] == ["iter_0000002"]
    held = sum(path.stat().st_size for path in save.glob("attempt_*/**/*") if path.is_file())
    assert held == 0, "space is held by what failed"


def poisoned(runs: Runs, layout: Layout, what: str, *flags: str) -> tuple[Result, list[str]]:
    """Train with ``faulty.poison``; the run, which has ended by a fault of the work, and what each worker said."""
    result = runs(Case(layout).with_flags(*flags).altered("faulty.poison", what, ROTTEN))
    assert set(result.ended.codes) == {EXIT_SAME_FAULT}, result.told()
    assert [step.iteration for step in result.steps] == [1, 2]
    check_steps_until(result, runs.reference(Case(layout)), 2)
    return result, [result.log(worker) for worker in range(4)]
