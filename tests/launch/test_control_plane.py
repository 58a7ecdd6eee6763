"""The launcher hosts the control plane, and the process for metrics: secret, verdict, no trace in other scripts."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from recover_megatron.launch.conclusion import Conclusion, last_checkpoint
from recover_megatron.launch.nodes import control_plane
from recover_megatron.launch.nodes.addresses import Address, listen
from recover_megatron.launch.nodes.control_plane import ControlPlane
from recover_megatron.launch.nodes.hosted import HostedCandidate
from recover_megatron.launch.workers.processes import spawn
from recover_megatron.launch.workers.states import ExitOutcome, exit_code_after
from recover_megatron.membership.events import Connected, Lost
from recover_megatron.membership.records import EXIT_NO_REPLICA, CoordinatorLost, Settings
from recover_megatron.membership.sides.node_agent import NodeAgent
from recover_megatron.membership.wire import Secret
from recover_megatron.network.event_loop import EventLoop
from tests.harness.processes import children, closed_port, command_line
from tests.harness.waiting import DEADLINE, eventually

from .conftest import IN_THE_RUN, SECRET, Launch, spec_of

ORDERS = ("evict", "epoch_wanted", "epoch_formed", "noted", "draining")
USES_IT = """
    import os, signal, sys
    from recover_megatron.membership.io.session import connect

    session = connect()
    plan = session.join({"hello": os.environ["RANK"]})
    print("MEMBERS", sorted(plan.members), flush=True)
    session.agree(1)
    if os.environ["RANK"] in sys.argv[1:]:
        os.kill(os.getpid(), signal.SIGKILL)
    session.leave()
    """


def test_a_run_whose_last_members_left_in_order_ends_with_0_whoever_died_before(bench):
    launch = bench.run("--nproc-per-node", 3, "--log-dir", "logs", bench.script(USES_IT), "1")
    assert launch.out.count("MEMBERS [0, 1, 2]") == 3
    assert "worker 1" in launch.err
    assert "killed by SIGKILL" in launch.err
    assert [stop["code"] for stop in bench.events("stop")] == [0]


AFTER_IT = """
    import os, signal, sys
    from recover_megatron.membership.io.session import connect

    session = connect()
    session.join({})
    session.agree(1)
    if os.environ["RANK"] == "2":
        sys.exit(3)  # in the training, which goes on without it
    session.wait_revoked()
    session.join({})
    session.leave()
    raise RuntimeError("the export of the model fails")
    """


def test_a_finished_run_whose_workers_all_fail_after_it_does_not_end_with_0(bench):
    launch = bench.run("--nproc-per-node", 3, "--log-dir", "logs", bench.script(AFTER_IT), ends=1)
    assert [stop["code"] for stop in bench.events("stop")] == [0]
    assert "the training was finished, but the script failed afterwards" in launch.err


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([], 0),  # none of this node's workers lived to the end: the others finished the run
        ([0, 0], 0),
        ([0, 1, 3], 1),  # the one that exports the model, or that has the last word
        ([0, -9], 0),  # a death, as in the training
        ([-9, -6], 137),
        ([-9, 1], 1),
        ([0, 13, 10], 0),
        ([13, 10], 1),  # not a code by which the job is started again
    ],
)
def test_the_exit_code_of_a_finished_run_is_that_of_the_scripts_end(ends: list[int], code: int) -> None:
    outcomes = [
        ExitOutcome(worker, end if end >= 0 else None, -end if end < 0 else None, float(worker))
        for worker, end in enumerate(ends)
    ]
    assert exit_code_after(outcomes[::-1]) == code


def test_a_signal_after_the_training_is_no_fault_of_a_node_beside_others() -> None:
    """Such a node may have one worker: the others have finished the run, and nobody would come to another launch."""
    killed, failed = ExitOutcome(0, None, 9, 1.0), ExitOutcome(0, 1, None, 1.0)
    assert [exit_code_after([killed], only_node=only) for only in (True, False)] == [137, 0]
    assert exit_code_after([failed], only_node=False) == 1


@pytest.mark.parametrize(("worker", "code"), [(4, 0), (3, 2)])
def test_a_worker_that_came_late_and_was_refused_is_no_fault_of_a_finished_run(worker: int, code: int) -> None:
    outcomes = [ExitOutcome(0, 0, None, 1.0), ExitOutcome(worker, 2, None, 2.0)]
    control = SimpleNamespace(agent=SimpleNamespace(left=frozenset({0, worker})))
    conclusion = SimpleNamespace(_control=control, _spec=spec_of(), _table=SimpleNamespace(outcomes=outcomes))
    assert Conclusion._code_after_training(conclusion) == code


def test_a_coordinator_whose_log_cannot_be_written_says_so_and_goes_on(bench):
    (bench.folder / "logs").mkdir()
    (bench.folder / "logs" / "events-0.jsonl").symlink_to("/dev/full")
    launch = bench.run("--nproc-per-node", 3, "--log-dir", "logs", bench.script(USES_IT), "1")
    assert launch.out.count("MEMBERS [0, 1, 2]") == 3
    warning = f"coordinator: {bench.folder}/logs/events-0.jsonl cannot be written (No space left on device)"
    assert launch.err.count(warning) == 1, launch.err


BEHIND_A_RELAY = """
    import os
    from recover_megatron.membership.io.session import connect

    session = connect()
    session.join({})
    print("JOINED", flush=True)
    while not os.path.exists("go"):
        if session.wait_revoked(0.01):
            session.join({})
            print("AGAIN", flush=True)
    session.leave()
    """


def relays_of(launch: Launch) -> list[int]:
    return [pid for pid in children(launch.pid) if any("membership.io.relay" in word for word in command_line(pid))]


def test_in_a_large_run_workers_use_a_relay_and_continue_without_it_when_it_ends(bench):
    launch = bench.up(3, "--relay-from", 3, bench.script(BEHIND_A_RELAY), says="JOINED")
    (relay,) = relays_of(launch)
    os.kill(relay, signal.SIGKILL)
    launch.wait_for("AGAIN", times=3)
    launch.wait_for(f"the relay (pid {relay}) was killed by SIGKILL: this node's workers connect to the coordinator")
    bench.go()
    launch.ends()
    assert len(bench.events("relay_lost")) == 1
    assert not bench.events("fault")


def test_a_small_run_has_no_relay_and_none_is_inherited_from_another_launch(bench):
    launch = bench.up(2, bench.script(IN_THE_RUN), says="JOINED", environment={"RECOVER_RELAY": "another"})
    assert not relays_of(launch)
    environments = [Path(f"/proc/{worker['pid']}/environ").read_bytes() for worker in bench.workers(count=2)]
    assert not any(b"RECOVER_RELAY" in environment for environment in environments)
    bench.go()
    launch.ends()


@pytest.mark.parametrize("variable", ["RECOVER_SECRET", "RECOVER_SECRET_FILE"])
def test_a_secret_that_cannot_be_used_is_refused_before_any_worker_starts(bench, variable):
    secret = bench.folder / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o644)
    value = "short" if variable == "RECOVER_SECRET" else str(secret)
    launch = bench.run(bench.script("print('STARTED')"), environment={variable: value}, ends=2)
    assert "secret" in launch.err
    assert "STARTED" not in launch.out
    assert "Traceback" not in launch.err
    assert "short" not in launch.err.replace("shorter", "")


def test_the_secret_is_in_no_command_line_and_in_no_log(bench):
    script = bench.script(
        """
        import os, pathlib, sys
        secret = os.environ["RECOVER_SECRET"].encode()
        lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
        print("SEEN", sum(secret in line for line in lines))
        pathlib.Path(sys.argv[1]).write_bytes(secret)
        """
    )
    launch = bench.run("--log-dir", "logs", script, "kept")
    assert "SEEN 0" in launch.out
    secret = (bench.folder / "kept").read_bytes()
    assert len(secret) == 64
    assert not [path for path in (bench.folder / "logs").iterdir() if secret in path.read_bytes()]


GIVES_UP = """
    import os, pathlib, sys, time
    from recover_megatron.arguments import config_from_argv, parse_addresses
    from recover_megatron.membership import CoordinatorLost
    from recover_megatron.membership.io.session import connect

    config = config_from_argv(sys.argv[2:])
    over = pathlib.Path("over")
    while sys.argv[1] == "at once" and os.environ["RANK"] == "0" and not over.exists():
        time.sleep(0.01)  # it comes to a run that is over
    session = connect(addresses=parse_addresses(config.coordinator))
    try:
        if sys.argv[1] == "at once" and os.environ["RANK"] == "1":
            session.give_up(42, "the disk is full")
        session.join({})
        if os.environ["RANK"] == "1":
            session.give_up(42, "the disk is full")
        session.agree(1)
        session.agree(2)
        session.wait_revoked()
    except CoordinatorLost as error:
        print("LOST", error, flush=True)
        over.touch()
        sys.exit(3)
    """


@pytest.mark.parametrize("when", ["at once", "in an epoch"])
def test_a_run_that_a_worker_gives_up_ends_with_its_code_whatever_the_workers_exit_with(bench, when):
    launch = bench.run("--nproc-per-node", 3, "--log-dir", "logs", bench.script(GIVES_UP), when, ends=42)
    assert launch.out.count("LOST the disk is full") == 3


def test_a_run_that_is_interrupted_is_told_as_ended_by_that_signal_and_with_its_last_checkpoint(bench):
    saved = bench.folder / "saved"
    saved.mkdir()
    (saved / "latest_checkpointed_iteration.txt").write_text("8")
    launch = bench.up(3, bench.script(IN_THE_RUN), "--recover", "--save", str(saved), says="JOINED")
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch.err
    assert f"last checkpoint: iteration 8 in {saved}" in launch.err
    (stop,) = bench.events("stop")
    assert stop["code"] == 130
    assert "ended by SIGINT" in stop["reason"]
    (bench.folder / "logs" / "steps.jsonl").write_text('{"iteration": 8}\n{"iteration": 9, "lo')
    over = json.loads(bench.status("logs", "--json").stdout)
    assert (over["code"], over["iteration"], over["world"], over["epoch"]) == (130, 8, 3, 1)
    shown = bench.status("logs").stdout
    assert "ended by SIGINT" in shown
    assert "last iteration 8   workers 3, 0 of them lost" in shown
    assert "0 of 0" not in shown


def test_a_coordinator_that_is_late_tells_in_its_log_how_an_interrupted_run_has_ended(bench):
    """It hears of the signal and of the workers' ends when they are over, and is not killed with the launch before."""
    launch = bench.up(2, bench.script(IN_THE_RUN), "--recover", says="JOINED")
    eventually(lambda: bench.events("witness"), "the launcher has come")
    (leader,) = [pid for pid in children(launch.pid) if "events-0.jsonl" in " ".join(command_line(pid))]
    os.kill(leader, signal.SIGSTOP)
    launch.send(signal.SIGINT)
    eventually(lambda: [w["state"] for w in bench.workers()] == ["killed"] * 2, "the workers have ended")
    os.kill(leader, signal.SIGCONT)  # the launcher waits some seconds for it; without that it would be killed by now
    assert launch.wait() == 130, launch.err
    assert [stop["code"] for stop in bench.events("stop")] == [130]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--save", "{0}"], "iteration 8 in {0}"),
        (["--save={0}", "--load", "elsewhere"], "iteration 8 in {0}"),
        (["--save", "{0}/none"], "no complete checkpoint in {0}/none"),
        (["--load", "{0}"], None),
        (["--save"], None),
    ],
)
def test_the_last_checkpoint_is_that_of_the_tracker_file(tmp_path, arguments, told):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8\n")
    found = last_checkpoint([argument.format(tmp_path) for argument in arguments])
    assert found == (told and told.format(tmp_path))


REPORTS_ITS_EXCEPTION = """
    import os, sys
    from recover_megatron.membership import CoordinatorLost
    from recover_megatron.membership.io.session import connect

    session = connect()
    session.join({})
    rank = int(os.environ["RANK"])
    if rank < 2:
        session.report_exception(7, None, "ValueError: bad", "Traceback", group=rank)
        os._exit(5)
    try:
        session.wait_revoked()
        session.join({})
        session.wait_revoked()
    except CoordinatorLost as error:
        print("LOST", error, flush=True)
        sys.exit(6)
    """


def test_a_fault_that_every_replica_repeats_ends_the_run_with_1(bench):
    launch = bench.run("--nproc-per-node", 3, bench.script(REPORTS_ITS_EXCEPTION), ends=1)
    assert "LOST iteration 7 fails wherever it is run, on worker" in launch.out


COMMAND_LINES = """
    import pathlib
    from recover_megatron.membership.io.session import connect

    session = connect()
    session.join({})
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode(errors="replace").split(chr(0))
        if "--listen-fd" in words:
            print("COORDINATOR", " ".join(words), flush=True)
    session.leave()
    """


def test_the_coordinators_get_the_times_of_the_scripts_flags(bench):
    flags = ["--recover-heartbeat-interval", "0.5", "--recover-heartbeat-timeout=20", "--recover-hang-timeout", "30"]
    launch = bench.run(bench.script(COMMAND_LINES), "--num-layers", 2, *flags)
    assert launch.out.count("--heartbeat-interval 0.5 --heartbeat-timeout 20.0 --hang-timeout 30.0") >= 2


def test_metrics_and_events_are_there_while_the_run_goes_on_and_of_its_end(bench):
    script = bench.script(
        """
        import os, time
        while not os.path.exists("told"):
            time.sleep(0.05)
        """
    )
    hook = bench.script(
        """
        import os, signal, sys
        for number in (signal.SIGUSR1, signal.SIGTERM):  # as SLURM tells every process of a step
            os.kill(os.getppid(), number)
        text = sys.stdin.read()
        with open("telling", "w") as file:
            file.write(text)
        os.replace("telling", "told")
        """,
        "hook.py",
    )
    launch = bench.run(
        "--log-dir", "logs", script, "--recover", "--recover-metrics-file", "run.prom", "--recover-on-event",
        f"{sys.executable} {bench.folder / hook}",
    )  # fmt: skip
    assert "the process for metrics" not in launch.err
    told = json.loads((bench.folder / "told").read_text())
    assert told["run"] == str(bench.folder / "logs")
    assert "recover_coordinator_up" in (bench.folder / "run.prom").read_text()


def test_a_launch_that_fails_before_the_training_begins_is_told_to_have_ended(bench):
    hook = bench.script("import sys; open('told', 'a').write(sys.stdin.read())", "hook.py")
    bench.run(
        "--log-dir", "logs", bench.script("raise SystemExit(3)"), "--recover", "--recover-metrics-file", "run.prom",
        "--recover-on-event", f"{sys.executable} {bench.folder / hook}", ends=3,
    )  # fmt: skip
    last = json.loads((bench.folder / "told").read_text().splitlines()[-1])
    assert (last["event"], last["state"]) == ("state", "ENDED")
    assert "exit code 3" in last["text"]
    assert re.search(r"^recover_exit_code\{.*\} 3.0$", (bench.folder / "run.prom").read_text(), re.MULTILINE)


def test_a_command_line_that_cannot_be_watched_is_refused(bench):
    launch = bench.run(bench.script("pass"), "--recover", "--recover-metrics", "no-port", ends=2)
    assert "--recover-metrics no-port" in launch.err


# -- a run that is joined ----------------------------------------------------------------------------------------------

LISTENS = '{"event":"listening","address":"10.0.0.1:7","world":2}\n'


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (LISTENS + '\0\0\n[]\n{"event":"stop","code":143,"reason":"told to"}\n', (143, "told to")),
        (LISTENS + '{"event":"stop","code":0,"reason":"all have left"}\n', (0, "all have left")),
        (LISTENS + '{"event":"stop","code":10,"reason":"of a launch before"}\n' + LISTENS, None),
        (LISTENS + '{"event":"commit","iteration":7}\n{"event":"stop","co', None),
        (LISTENS + '{"event":"stop","code":11,"reason":"the other side may go on"}\n', None),
        (LISTENS.replace(":7", ":8") + '{"event":"stop","code":0,"reason":"of an earlier run"}\n', None),
    ],
)
def test_the_end_of_a_run_is_what_one_of_its_own_coordinators_has_logged(
    tmp_path: Path, log: str, found: tuple[int, str] | None
) -> None:
    (tmp_path / "events-0.jsonl").write_text(LISTENS.replace("10.0.0.1", "10.0.0.2"))
    (tmp_path / "events-1.jsonl").write_text(log)
    assert control_plane.recorded(tmp_path, [("10.0.0.2", 7), ("10.0.0.1", 7)]) == (True, found)
    assert control_plane.recorded(tmp_path, [("10.0.0.3", 7)]) == (False, None), "it has not begun"


@contextmanager
def joiner(folder: Path, addresses: Sequence[Address], timeout: float, say: Callable[[str], None]) -> Iterator:
    """The control plane of a launcher that joins a run whose workers give up a coordinator after 4 ``timeout``."""
    loop, plan = EventLoop(), spec_of(joins=addresses, joined_world_size=2, log_dir=folder)
    control = ControlPlane(plan, loop, say, SimpleNamespace(**dict.fromkeys(ORDERS)))
    control._settings = dataclasses.replace(
        control._settings, heartbeat_interval=timeout / 2, heartbeat_timeout=timeout
    )
    control.open(None)
    try:
        yield control
    finally:
        control.close()
        loop.close()


@pytest.mark.parametrize(("hung", "timeout"), [(False, 0.1), (False, 0.2), (True, 0.1)])
def test_a_run_is_over_where_no_process_listens_for_it_and_not_where_one_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hung: bool, timeout: float
) -> None:
    """And not before the workers of the run give up a coordinator that is started again."""
    monkeypatch.setattr(control_plane, "NOBODY_SECONDS", 0.5)
    monkeypatch.setattr(control_plane, "LOOK_SECONDS", 0.02)
    waited = list[bool]()
    with closed_port() as port, listen("127.0.0.1") as listener:
        (tmp_path / "events-0.jsonl").write_text(LISTENS.replace("10.0.0.1:7", f"127.0.0.1:{port}"))
        addresses = ("127.0.0.1", port), *[listener.getsockname()[:2]] * hung
        with joiner(tmp_path, addresses, timeout, pytest.fail) as control:
            control.when_led(1.2 if hung else DEADLINE, lambda: waited.append(True))
            while not waited:
                control._loop.run_once()
            if hung:
                assert (control.found_ended, control.agent.refused_seconds) == (None, 0.0)
            else:
                code, reason = control.found_ended
                told = f"no process has listened at the coordinators' addresses for {max(0.5, 4 * timeout):g} s"
                assert (code, reason.startswith(told)) == (10, True), reason


def test_a_joiner_waits_for_the_first_coordinator_of_a_run_that_has_not_begun(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(control_plane, "NOBODY_SECONDS", 0.1)
    monkeypatch.setattr(control_plane, "LOOK_SECONDS", 0.02)
    said, waited = list[str](), list[bool]()
    with closed_port() as port, joiner(tmp_path, [("127.0.0.1", port)], 0.02, said.append) as control:
        control.when_led(DEADLINE, lambda: waited.append(True))
        while not said or control.agent.refused_seconds < 0.4:
            control._loop.call_later(0.02, lambda: None)
            control._loop.run_once()
        assert (len(said), control.found_ended, waited) == (1, None, [])
        assert said[0].startswith(f"no process listens at 127.0.0.1:{port}, and no run is known to have begun there")
        with control.agent._client.condition:
            for event in (Connected(), Lost("one was there, and is not any more")):
                control.agent._core.handle(event, time.monotonic())
        while not waited:
            control._loop.run_once()
        assert control.found_ended[0] == 10


def test_a_launcher_that_comes_to_a_run_that_has_ended_ends_as_it_did_and_leaves_the_folder_to_others(bench) -> None:
    (bench.folder / "logs").mkdir()
    address = "127.0.0.1:9"
    (bench.folder / "logs" / "events-0.jsonl").write_text(
        LISTENS.replace("10.0.0.1:7", address) + '{"event":"stop","code":143,"reason":"ended by SIGTERM"}\n'
    )
    how = ["--join", "--recover-coordinator", address, "--world-size", 2, "--master-port", 9, "--log-dir", "logs"]
    launch = bench.run(*how, bench.script("pass"), "--recover", environment=SECRET, ends=143)
    assert "the run that this launcher should join has ended (ended by SIGTERM): exit code 143" in launch.err
    assert (bench.folder / "logs" / "launch.lock").read_bytes() == b"", "it has claimed nothing"


def test_that_a_candidate_cannot_be_started_is_told_once_in_each_line(monkeypatch) -> None:
    said, due, starts = [], [], iter([spawn(["/bin/true"], os.environ, 1, 2)])

    def start(_: object) -> tuple[int, int]:
        for started in starts:
            return started
        raise OSError(errno.EAGAIN, "no process is left")

    loop, agent = EventLoop(), SimpleNamespace(out=None)
    monkeypatch.setattr(loop, "call_later", lambda seconds, callback: due.append(callback))
    hosted = HostedCandidate(loop, SimpleNamespace(number=0, start=start), listen("127.0.0.1"), agent, said.append)
    hosted._ended(hosted._process.reap() or -9)
    for _ in range(4):
        due.pop()()
    assert len(said) == 4
    assert all(line.count("cannot be started") == 1 for line in said), said
    loop.close()


@pytest.mark.parametrize("code", [0, EXIT_NO_REPLICA])
def test_a_launcher_whose_coordinator_has_ended_the_run_knows_it_whatever_it_has_missed(code: int) -> None:
    """It was stopped, so its connection was given up: it has only its own socket to dial, where nobody answers."""
    loop, listener = EventLoop(), listen("127.0.0.1")
    secret = Secret(b"that of this run alone")
    agent = NodeAgent([listener.getsockname()[:2]], "node", secret, SimpleNamespace(), Settings(heartbeat_timeout=600))
    start = lambda _: spawn(["/bin/sh", "-c", f"exit {code}"], os.environ, 1, 2)  # noqa: E731
    HostedCandidate(loop, SimpleNamespace(number=0, start=start), listener, agent, pytest.fail)
    loop.call_later(DEADLINE, lambda: pytest.fail("it waits for who does not answer"))
    while agent.out is None:
        loop.run_once()
    loop.close()
    assert isinstance(agent.out, CoordinatorLost)
    assert (agent.out.code, agent.out.reported) == (code, True)
    assert listener.fileno() == -1, "nobody else dials it in vain"
