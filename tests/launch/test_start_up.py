"""How a launch ends, with which exit code; if a worker or a launcher is lost before the training has begun it ends on
all nodes, and says why.
"""

import os
import signal
import socket
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from recover_megatron.launch.conclusion import Conclusion, StartUp
from recover_megatron.launch.nodes.addresses import listen
from recover_megatron.launch.nodes.control_plane import ControlPlane
from recover_megatron.launch.nodes.hosted import HostedCandidate
from recover_megatron.launch.nodes.peers import Line
from recover_megatron.launch.supervisor import Supervisor
from recover_megatron.launch.workers import processes, successors
from recover_megatron.launch.workers.environment import launch_environment
from recover_megatron.launch.workers.processes import START_AGAIN, spawn
from recover_megatron.launch.workers.states import ExitOutcome, run_exit_code, start_exit_code
from recover_megatron.membership.records import EXIT_NO_REPLICA, CoordinatorLost
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.variables import ATTEMPT_VARIABLE, WITHOUT_VARIABLE
from tests.harness import REPOSITORY
from tests.harness.processes import python
from tests.harness.waiting import DEADLINE, eventually

from .conftest import UNTIL_TOLD, Bench, Launch, spec_of

ENDLESS = """
    import os, sys, time
    print("UP", os.environ["RANK"], flush=True)
    if sys.argv[1] == os.environ["RANK"]:
        while not os.path.exists("go"):
            time.sleep(0.01)
        if sys.argv[2] == "raise":
            raise ValueError("no such token")
        sys.exit(int(sys.argv[2]))
    time.sleep(1000)
    """
CONNECTED = """
    import os, sys, time
    from recover_megatron.membership.records import CoordinatorLost
    from recover_megatron.membership.io.session import connect

    session = connect()
    try:
        if "RANK" in os.environ and os.environ["RANK"] == "0":
            session.join({})  # it has come to the training; the others have not
    except CoordinatorLost as lost:
        sys.exit(lost.code)  # as Megatron's workers do
    time.sleep(1000)
    """


KILLED = -signal.SIGKILL


def ends(*statuses: int) -> list[ExitOutcome]:
    """Workers that ended in this order, each with an exit code or minus a signal."""
    return [
        ExitOutcome(worker_id, None if status < 0 else status, -status if status < 0 else None, float(worker_id))
        for worker_id, status in enumerate(statuses)
    ]


@pytest.mark.parametrize(("number", "code", "why"), [(signal.SIGINT, 130, "SIGINT"), (signal.SIGKILL, 10, "SIGKILL")])
def test_recover_status_tells_how_a_run_ended_that_never_began(bench: Bench, number: int, code: int, why: str) -> None:
    launch = bench.up(2, bench.script(ENDLESS), "-", "-", "--recover")
    if number == signal.SIGKILL:
        bench.kill(1, 2)
    else:
        launch.send(number)
    assert launch.wait() == code, launch.err
    said = bench.status("logs", "--check")
    assert (said.returncode, said.stderr) == (2, "")
    assert said.stdout.startswith(f"ENDED: exit code {code}: ")
    assert why in said.stdout
    if number == signal.SIGINT:
        assert said.stdout.startswith("ENDED: exit code 130: ended by SIGINT, which the launcher on ")
        assert launch.err.splitlines()[-1].startswith("recover-run: ended by SIGINT: 0 of 2 workers finished")


def lines_about(launch: Launch, worker: int) -> list[str]:
    return [line for line in launch.err.splitlines() if f"worker {worker} on " in line]


@pytest.mark.parametrize("victims", [[1], [0, 2]])
def test_workers_that_are_killed_end_the_launch_with_a_code_that_is_requeued(bench: Bench, victims) -> None:
    argv = [bench.script(ENDLESS), "-", 0, "--recover", "--recover-device", "cpu"]
    launch = bench.up(3, *argv)
    pids = [bench.workers(count=3)[victim]["pid"] for victim in victims]
    launch.send(signal.SIGSTOP)  # the launcher ends the others at the first death that it sees
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    launch.send(signal.SIGCONT)
    launch.ends(10)
    first = next(line for line in launch.err.splitlines() if "was killed by SIGKILL" in line)
    record = bench.workers()[victims[0]]
    assert any(f"worker {victim} on {record['host']}" in first for victim in victims)
    assert "the training has not begun and needs all workers: the launch ends with exit code 10" in first
    assert str(bench.folder / "logs" / "worker-") in first
    assert "continue" not in launch.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "cause"), [("raise", 1, "ValueError: no such token"), ("7", 7, ""), ("10", 10, "")]
)
def test_a_worker_that_fails_by_itself_ends_the_launch_with_its_code_and_cause(bench: Bench, how, code, cause) -> None:
    launch = bench.up(3, bench.script(ENDLESS), 1, how, "--recover")
    bench.go()
    assert launch.wait() == code
    for line in lines_about(launch, 1):
        assert f"worker 1 on {bench.workers()[1]['host']}" in line
        assert cause in line
    assert f"the launch ends with exit code {code}" in launch.err
    assert [worker["state"] for worker in bench.workers()] == ["killed", "failed", "killed"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_has_a_session_already_ends_the_launch_too(bench: Bench, victim: int) -> None:
    """The coordinator leads, and could do without it; what the others wait in could not."""
    launch = bench.start("--nproc-per-node", 3, "--log-dir", "logs", bench.script(CONNECTED), "--recover")
    wait_for_sessions(bench, 3)
    bench.kill(victim, 3)
    assert launch.wait() == 10
    assert f"worker {victim} on" in launch.err


def wait_for_sessions(bench: Bench, count: int) -> None:
    eventually(lambda: len(bench.events("attached")) >= count, f"{count} workers have a session")


def test_without_recover_our_script_needs_all_workers_at_any_time(bench: Bench) -> None:
    script = bench.script(ENDLESS, "pretrain_gpt_recover.py")
    launch = bench.up(2, script, "-", 0)
    bench.kill(1, 2)
    assert launch.wait() == 137
    assert "a training without --recover needs all workers" in launch.err


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "how"), [(1, "kill"), (3, "kill"), (2, "raise")])
def test_all_nodes_end_at_once_with_the_same_code(bench: Bench, victim: int, how: str) -> None:
    started = bench.nodes(2, bench.script(ENDLESS), victim if how == "raise" else "-", how, "--recover")
    for launch in started:
        launch.wait_for("UP", times=2)
    started[0].wait_for("all 2 nodes take part")
    bench.go()
    if how == "kill":
        bench.kill(victim, 4)
    code = 10 if how == "kill" else 1
    assert [launch.wait() for launch in started] == [code, code], started[0].err + started[1].err
    for launch in started:
        (said,) = {line.partition("worker ")[2] for line in lines_about(launch, victim) if "the launch ends" in line}
        assert "SIGKILL" in said if how == "kill" else "ValueError: no such token" in said
        assert "logs/worker-" in said
        assert launch.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_lost_before_the_training_has_begun_ends_the_others(bench: Bench, victim: int) -> None:
    started = bench.nodes(2, bench.script(CONNECTED), "--recover")
    wait_for_sessions(bench, 4)
    started[victim].send(signal.SIGKILL)
    other = started[1 - victim]
    assert other.wait() == 10, other.err
    assert "lost; the training has not begun" in other.err
    assert other.left() == []


@pytest.mark.parametrize(
    ("decides", "statuses", "plain", "fault_tolerant"),
    [
        (run_exit_code, (), 0, 0),
        (run_exit_code, (0, 0, 0), 0, 0),
        (run_exit_code, (0, 3, 0), 3, 0),
        (run_exit_code, (KILLED, 0, 0), 137, 0),
        (run_exit_code, (3, 4, 4), 3, 4),
        (run_exit_code, (3, 4), 3, 3),
        (run_exit_code, (KILLED, 1, 1), 137, 1),
        (run_exit_code, (KILLED, KILLED), 137, 137),
        (run_exit_code, (KILLED, 10, 10), 10, 10),
        (run_exit_code, (1, 12, 11), 12, 12),
        (run_exit_code, (0, 11), 11, 11),
        (start_exit_code, (KILLED, 0, 0), 137, 10),
        (start_exit_code, (KILLED, KILLED), 137, 10),
        (start_exit_code, (1, 10, 10), 10, 1),
        (start_exit_code, (10, 1, KILLED), 10, 1),
        (start_exit_code, (3, KILLED, 1), 3, 3),
        (start_exit_code, (KILLED, 10, 10), 10, 10),
        (start_exit_code, (11, 13), 11, 10),
        (start_exit_code, (2, 2), 2, 2),
    ],
)
def test_exit_code_table(decides, statuses, plain, fault_tolerant):
    assert decides(ends(*statuses), fault_tolerant=False) == plain
    assert decides(ends(*statuses), fault_tolerant=True) == fault_tolerant


def test_first_means_earliest_in_time_not_lowest_worker_id():
    outcomes = [ExitOutcome(0, 4, None, 2.0), ExitOutcome(1, 3, None, 1.0)]
    assert run_exit_code(outcomes, fault_tolerant=False) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), 5), (("--recover",), 5), (("--recover", "--all-fail"), 6)],
)
def test_recover_run_exits_by_the_table(bench, arguments, code):
    script = bench.script(
        """
        import os, sys
        if "--all-fail" in sys.argv:
            sys.exit(6)
        sys.exit(5 if os.environ["RANK"] == "1" else 0)
        """
    )
    bench.run("--nproc-per-node", 3, script, *arguments, ends=code)


def test_workers_that_failed_alike_are_summed_up_once(bench):
    launch = bench.run("--nproc-per-node", 3, bench.script("import sys; sys.exit(7)"), ends=7)
    last = launch.err.strip().splitlines()[-1]
    assert "0 of 3 workers finished" in last
    assert "workers 0-2 failed with exit code 7" in last
    assert last.count("exit code 7") == 2  # the workers', together, and recover-run's own


class Start:
    """A ``StartUp`` of four nodes with two workers each, the last of which has three spares."""

    def __init__(self, **fields: object) -> None:
        self.plan = spec_of(**{"nnodes": 4, "nproc_per_node": 2, "node_rank": 0, "spares": 3, "script": "x", **fields})
        self.ended: list[tuple[str, int, tuple[int, ...]]] = []
        self.said: list[str] = []
        self.waits: list[Callable[[], None]] = []
        self.control = SimpleNamespace(
            agent=SimpleNamespace(planned=frozenset()), when_up_to_date=lambda _, then: self.waits.append(then)
        )
        table = SimpleNamespace(launched=[])
        fail = lambda reason, code, without=(): self.ended.append((reason, code, tuple(without)))  # noqa: E731
        self.up = StartUp(None, self.plan, table, self.control, self.said.append, pytest.fail, fail)

    def loses(self, *nodes: int) -> tuple[str, int, tuple[int, ...]]:
        for node in nodes:
            self.up.launcher_lost(f"node {node} (its host is silent)", "the others go on", node)
        for then in self.waits:
            then()
        return self.ended[0]


def test_a_lost_node_is_left_out_of_the_next_start_if_spares_have_its_places() -> None:
    reason, code, without = Start().loses(1)
    assert (code, without) == (START_AGAIN, (1,))
    assert reason.endswith(
        "node 1 (its host is silent) is lost; the training has not begun and needs all workers: the launch starts "
        "again (1 of at most 3) without node 1, spares of node 3 as workers 2-3"
    )


@pytest.mark.parametrize(
    ("lost", "fields"),
    [
        ([0], {}),  # with the store
        ([3], {}),  # with the spares
        ([1], {"spares": 1, "max_restarts": 9}),
        ([1, 2], {}),
        ([2], {"without": (1,), "attempt": 1}),
        ([1], {"attempt": 3}),
        ([1], {"node_rank": 2}),  # node 0 decides
    ],
)
def test_else_the_launch_ends_with_a_code_that_is_requeued(lost: list[int], fields: dict[str, object]) -> None:
    start = Start(**fields)
    reason, code, _ = start.loses(*lost)
    assert code == 10
    assert reason.endswith(": the launch ends with exit code 10")
    assert start.said == []


def test_two_nodes_that_are_lost_at_once_are_left_out_together() -> None:
    assert Start(spares=4).loses(1, 2)[1:] == (START_AGAIN, (1, 2))


def test_a_node_that_is_lost_when_the_training_has_begun_ends_nothing() -> None:
    start = Start()
    start.up.launcher_lost("node 1", "the others go on", 1)
    start.control.agent.planned = frozenset({0})
    start.waits[0]()
    start.up.launcher_lost("node 2", "", 2)
    assert (start.ended, start.said) == ([], ["the others go on"])


def test_spares_have_the_places_of_the_workers_of_nodes_that_are_left_out() -> None:
    plan = spec_of(nnodes=4, nproc_per_node=2, node_rank=3, spares=5, without=(2, 1))
    workers = [(worker.worker_id, worker.local_rank, worker.rank) for worker in successors.launched(plan)]
    assert workers == [(6, 0, 6), (7, 1, 7), (4, 2, 4), (5, 3, 5), (2, 4, 2), (3, 5, 3), (8, 6, None)]
    assert plan.candidate_nodes == (0, 3)
    assert launch_environment(plan)["LOCAL_WORLD_SIZE"] == "6"
    assert spec_of(nnodes=6, slurm=True, without=(1,)).candidate_nodes == (2, 3, 4)
    assert [w.worker_id for w in successors.launched(spec_of(nnodes=4, nproc_per_node=2, node_rank=0, spares=5))] == [
        0,
        1,
    ]


@pytest.mark.parametrize(("accepted", "seconds"), [(False, 5.0), (True, 5.0), (False, 0.1), (False, 3600.0)])
def test_a_line_tells_of_the_end_of_another_launcher_at_once(accepted: bool, seconds: float) -> None:
    """Whether it has taken the connection or not."""
    loop, told = EventLoop(), []
    try:
        loop.call_later(DEADLINE, lambda: told.append(None))
        with socket.create_server(("127.0.0.1", 0)) as door:
            Line(loop, door.getsockname()[:2], seconds, told.append)
            if accepted:
                door.accept()[0].close()
            else:
                loop.run_once()  # it is connected
        while not told:
            loop.run_once()
        assert told == [True]
    finally:
        loop.close()


def test_the_next_start_knows_its_number_and_whom_it_is_made_without(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(processes.os, "closerange", lambda *_: None)  # nothing is closed here
    monkeypatch.setattr(processes.os, "execve", lambda program, argv, environ: told.append(environ))
    for name in (ATTEMPT_VARIABLE, WITHOUT_VARIABLE):
        monkeypatch.setenv(name, "")
    for kept, attempt in ((None, 1), (4, 4)):
        processes.take_attempt()
        processes.leave_out([3, 1])
        if kept is not None:
            processes.keep_attempt(kept)
        processes.start_again(1)
        monkeypatch.setattr(processes.os, "environ", told[-1])
        assert (processes.take_attempt(), processes.take_left_out()) == (attempt, (3, 1))
        assert not {ATTEMPT_VARIABLE, WITHOUT_VARIABLE} & processes.os.environ.keys()


INTERRUPTED = """
    import os, signal, sys

    class Interrupts:
        def find_spec(self, name, path=None, target=None):
            if name == "recover_megatron.launch.command":  # from here on most of a second is spent on imports
                os.kill(os.getpid(), signal.SIGINT)

    sys.meta_path.insert(0, Interrupts())
    from recover_megatron.launch.__main__ import main
    main(["script.py"])
    """


def test_ctrl_c_while_recover_run_itself_is_starting_ends_it_without_a_traceback() -> None:
    ended = python("-c", textwrap.dedent(INTERRUPTED))
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


REFUSES_WORKER_1 = """
    import errno, os

    spawn = os.posix_spawn

    def refused(path, command, environment, **options):
        if environment.get("RECOVER_WORKER_ID") == "1":
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # as by ulimit -u
        return spawn(path, command, environment, **options)

    os.posix_spawn = refused
    """


def test_a_worker_that_cannot_be_started_ends_the_launch_which_names_it_and_the_reason(bench: Bench) -> None:
    bench.script(REFUSES_WORKER_1, "sitecustomize.py")
    path = {"PYTHONPATH": f"{bench.folder}:{REPOSITORY}"}
    launch = bench.run("--nproc-per-node", 2, bench.script(UNTIL_TOLD), environment=path, ends=1)
    assert "worker 1 cannot be started: [Errno 11] Resource temporarily unavailable" in launch.err
    assert "Traceback" not in launch.err


def test_a_launcher_asks_its_coordinators_for_the_verdict_before_it_ends_them() -> None:
    """The last worker may have told them just now what decides how the run has ended."""
    launcher = MagicMock(_code=None)
    launcher._subreaper.kill_all.return_value = []
    code = Supervisor._close(launcher)
    done = [call[0] for call in launcher.mock_calls]
    assert code is launcher._conclusion.exit_code.return_value
    launcher._conclusion.exit_code.assert_called_once_with(None, launcher._conclusion.verdict.return_value)
    assert done.index("_conclusion.verdict") < done.index("_control.end_candidates") < done.index("_subreaper.kill_all")


def test_a_launcher_lets_its_coordinator_write_how_the_run_has_ended_before_it_ends_it(tmp_path: Path) -> None:
    """The coordinator, here a shell, has told the launcher already."""
    loop, listener, log = EventLoop(), listen("127.0.0.1"), tmp_path / "log"
    over = CoordinatorLost("no live worker is left", EXIT_NO_REPLICA, reported=True)
    address = listener.getsockname()[:2]
    wait = lambda seconds: None  # noqa: E731
    agent = SimpleNamespace(out=over, led=True, epoch=1, connected_to=address, catch_up=wait, wait_out=wait)
    start = lambda _: spawn(["/bin/sh", "-c", f"echo stop >{log}"], os.environ, 1, 2)  # noqa: E731
    control = ControlPlane(spec_of(), loop, pytest.fail, SimpleNamespace())
    control.agent = agent
    candidate = HostedCandidate(loop, SimpleNamespace(number=0, start=start), listener, agent, pytest.fail)
    control._candidates[address] = candidate
    verdict = Conclusion.verdict(SimpleNamespace(_control=control, _table=SimpleNamespace(all=[])))
    assert (verdict, log.exists()) == (EXIT_NO_REPLICA, True)
    coordinator = candidate._process.pid
    control.end_candidates()
    os.waitpid(coordinator, 0)
    loop.close()
