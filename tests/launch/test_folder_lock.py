"""A log folder: one run at a time, workers.json, the secret; and no cleaning up after a run that was killed."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import stat
import subprocess
import threading
from dataclasses import replace

import pytest

from recover_megatron.launch import command
from recover_megatron.launch.command_line.arguments import UsageError
from recover_megatron.launch.workers import log_folder
from recover_megatron.launch.workers.log_folder import Claim, FolderLock, SecretFile, WorkersFile
from recover_megatron.launch.workers.states import WorkerProcess, WorkerState
from tests.harness.processes import free_port
from tests.harness.waiting import DEADLINE, eventually

from .conftest import IN_THE_RUN, SECRET, UNTIL_TOLD, spec_of
from .test_newcomers import HELD, SCRIPT, how_to_join, training

MINE = Claim(100, "here", 1.0, "first", nnodes=2, master_addr="a", master_port=29500, world_size=4)
OTHER = replace(MINE, pid=200, run_id="second", master_port=29600)


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setattr(log_folder, "ENDING_SECONDS", 0.2)
    monkeypatch.setattr(log_folder, "_LOOK_SECONDS", 0.01)
    return lambda claim, say=pytest.fail: FolderLock(tmp_path, claim, say)


def die(lock):
    """As a killed launcher: the kernel closes its files."""
    os.close(lock._descriptor)


def test_a_folder_that_is_held_is_refused_with_pid_and_host_until_its_holders_are_gone(lock):
    first = lock(MINE)
    assert first.take() is None
    for attempt in (
        lock(OTHER).take,
        lambda: lock(OTHER).share("second"),
        lambda: lock(replace(OTHER, master_addr="b")).join("second"),
    ):
        assert "in use by another run (recover-run with pid 100 on host here, started 1970-" in attempt()
    mate = lock(replace(MINE, pid=101))
    assert mate.share("first") is None
    die(first)
    assert "with pid 100 on host here" in lock(OTHER).take()
    die(mate)
    assert lock(OTHER).take() is None


def test_a_launcher_of_node_0_that_is_started_once_more_finds_its_own_run_in_the_folder(lock):
    lines = []
    first, mate = (lock(replace(MINE, nnodes=2, pid=pid)) for pid in (100, 101))
    assert (first.take(), mate.share("first")) == (None, None)
    die(first)
    again = lock(replace(MINE, nnodes=2, pid=102, run_id="second"), lines.append)
    assert "is in use by the other nodes of this run, which was started by recover-run with pid 100" in again.take()
    assert again.continued
    assert len(lines) == 1, "it says once that it waits"
    other = lock(replace(OTHER, nnodes=2))
    assert "by another run" in other.take()
    assert not other.continued
    die(mate)
    assert again.take() is None
    assert not again.continued


def test_the_next_run_waits_for_the_launchers_that_a_run_that_has_ended_still_has(lock, monkeypatch):
    """Node 0 starts the next one when it has ended; the others of the last one need a moment longer."""
    first, mate = lock(MINE), lock(replace(MINE, pid=101))
    assert (first.take(), mate.share("first")) == (None, None)
    first.end(0, "")
    die(first)
    assert "in use" in lock(OTHER).take()  # they have not ended within ENDING_SECONDS
    monkeypatch.setattr(log_folder, "ENDING_SECONDS", DEADLINE)
    monkeypatch.setattr(log_folder.time, "sleep", lambda seconds: die(mate))
    assert lock(OTHER).take() is None


def test_a_start_that_is_made_again_does_not_wait_for_a_lost_node_that_still_holds_the_folder(lock, monkeypatch):
    first, lost = lock(MINE), lock(replace(MINE, pid=101))
    assert (first.take(), lost.share("first")) == (None, None)
    first.end(None, "")
    die(first)
    again = lock(replace(MINE, run_id="again"))
    monkeypatch.setattr(log_folder.time, "sleep", lambda seconds: pytest.fail("it waits"))
    assert again.take() is None
    assert lock(replace(MINE, pid=102)).share("again") is None
    monkeypatch.undo()
    assert "in use by another run" in lock(OTHER).take()


def test_nodes_of_a_launch_that_has_not_begun_wait_for_it_and_others_are_refused_at_once(lock):
    assert lock(replace(MINE, pid=3)).check() is None
    first = lock(MINE)
    assert first.take() is None
    assert lock(replace(MINE, pid=3, run_id="not known yet")).check() is None
    assert "in use" in lock(replace(OTHER, master_port=29501)).check()
    assert "in use" in lock(replace(OTHER, nnodes=3)).check()


def test_a_node_that_comes_while_node_0_makes_its_claim_waits_until_that_is_written(lock, monkeypatch):
    """Nodes that share a file system start at the same moment: the lock is held then, and the file says nothing yet."""
    first, mate = lock(MINE), lock(replace(MINE, pid=3))
    write, answers = FolderLock._write, []
    asking = threading.Thread(target=lambda: answers.append(mate.check()))

    def write_while_asked(self, claim):
        asking.start()
        asking.join(0.2)  # as long as it answers too early, it does so here
        assert not answers
        write(self, claim)

    monkeypatch.setattr(FolderLock, "_write", write_while_asked)
    assert first.take() is None
    asking.join(DEADLINE)
    assert answers == [None]


def test_a_node_that_looks_does_not_keep_node_0_from_the_folder_that_a_killed_launch_left(lock, monkeypatch):
    """To look is to lock for a moment."""
    killed, first, mate = lock(OTHER), lock(MINE), lock(replace(MINE, pid=3))
    assert killed.take() is None
    die(killed)
    read, answers = FolderLock._read, []
    taking = threading.Thread(target=lambda: answers.append(first.take()))

    def read_while_taken(self):
        if self is mate:
            taking.start()
            taking.join(0.2)  # as long as it is refused for the look, it is so here
        return read(self)

    monkeypatch.setattr(FolderLock, "_read", read_while_taken)
    assert mate.check() is None
    taking.join(DEADLINE)
    assert answers == [None]


def test_what_a_launcher_has_started_does_not_hold_the_folder_after_it(lock):
    first = lock(MINE)
    assert first.take() is None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        die(first)
        assert lock(OTHER).take() is None
        assert child.poll() is None


def test_nodes_that_share_a_folder_of_their_own_may_come_at_the_same_time(lock):
    second, third = lock(replace(MINE, pid=2)), lock(replace(MINE, pid=3))
    assert second.share("of node 0") is None
    assert third.share("of node 0") is None
    assert second.share("of node 0") is None
    assert "in use" in lock(OTHER).take()


def test_who_joins_a_run_shares_its_folder_and_takes_another_for_itself(lock):
    joiner = lock(replace(MINE, pid=7, nnodes=1, run_id="joined"))
    assert joiner.join("joined") is None
    assert joiner.run_id == "joined"
    assert joiner.share("joined") is None
    assert joiner.held
    die(joiner)
    first = lock(MINE)
    assert first.take() is None
    joiner = lock(replace(MINE, pid=7, nnodes=1, run_id="joined"))
    assert joiner.join("joined") is None
    assert joiner.run_id == "first"
    assert joiner.share("of a script's folder, which knows the run by the claim alone") is None
    assert joiner.held
    assert "in use" in lock(replace(MINE, world_size=8, run_id="joined")).join("joined")


def test_a_joiner_that_waits_for_a_coordinator_keeps_no_launch_from_a_folder_whose_run_has_ended(lock, monkeypatch):
    first = lock(MINE)
    assert first.take() is None
    joiner = lock(replace(MINE, pid=7, nnodes=1, run_id="joined"))
    assert joiner.join("joined") is None
    die(first)
    mate = lock(replace(MINE, pid=8))
    assert mate.check() is None
    again = lock(replace(MINE, pid=9, run_id="again"), lambda text: None)
    monkeypatch.setattr(log_folder, "ENDING_SECONDS", 0.0)
    assert again.take() is None
    assert mate.share("again") is None
    assert "in use" in joiner.share("joined"), "the run that it was to join is over"


def test_a_run_of_another_host_that_has_not_ended_and_holds_no_lock_is_told_of(lock):
    first = lock(MINE)
    assert first.take() is None
    die(first)  # or it lives on its host, and the file system keeps no locks between hosts
    said = []
    second = lock(replace(OTHER, host="there"), said.append)
    assert second.take() is None
    assert "was used by recover-run with pid 100 on host here" in said[0]
    second.end(0, "")
    die(second)
    assert lock(MINE).take() is None


def test_without_locks_a_run_goes_on_and_says_once_that_another_would_not_be_noticed(lock, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    said = []
    first, mate, joiner = (lock(replace(MINE, pid=pid), said.append) for pid in (100, 101, 102))
    assert (first.take(), mate.check(), mate.share("first"), joiner.join("joined")) == (None, None, None, None)
    assert (first.held, mate.held, joiner.run_id) == (True, True, "first")  # so workers.json is written
    assert len(said) == 3
    assert all("has no locks (No locks available): another run there would not be noticed" in text for text in said)


@pytest.mark.parametrize("name", [log_folder.LOCK_FILE, log_folder.ORDER_FILE])
def test_a_link_in_the_place_of_a_lock_is_not_followed(lock, tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    assert "cannot be used (Too many levels of symbolic links)" in lock(MINE).take()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_a_second_run_is_refused_before_it_touches_anything_and_a_killed_one_leaves_nothing_to_clean_up(bench):
    script = bench.script(UNTIL_TOLD)
    first = bench.up(1, script)
    bench.workers()  # it changes no more
    logs = bench.folder / "logs"
    kept = [path for path in logs.iterdir() if path.suffix != ".tmp"]
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in kept}
    second = bench.run("--log-dir", "logs", script, ends=2)
    who = rf"recover-run with pid {first.pid} on host {socket.gethostname()}, "
    assert re.search(rf"logs is in use by another run \({who}", second.err)
    assert "UP" not in second.out
    for path, (number, content) in before.items():
        assert path.stat().st_ino == number or path.name == "workers.json"
        assert path.read_bytes().startswith(content)
    assert not list(logs.glob("*.old"))
    first.send(signal.SIGKILL)
    first.wait()
    third = bench.up(1, script)
    bench.go()
    assert third.wait() == 0
    assert bench.workers()[0]["state"] == "finished"


@pytest.mark.slow
def test_a_launcher_may_join_in_the_folder_of_the_run(bench):
    held = {**HELD, **SECRET}
    first = training(bench, 1, 0, *SCRIPT, environment=held)
    second = bench.start(*how_to_join(first).split(), "--log-dir", "logs", *SCRIPT, environment=held)
    eventually(lambda: len(bench.workers()) == 2, "both launchers' workers in one file")
    assert not (bench.folder / "logs" / "worker-0.log.old").exists()
    bench.go()
    assert first.wait() == 0
    second.wait()
    assert json.loads((bench.folder / "logs" / "launch.lock").read_text())["ended"]


@pytest.mark.slow
def test_nodes_share_a_folder_and_a_second_launch_of_several_is_refused_there(bench):
    waits = bench.script(UNTIL_TOLD)

    def start(node, port):
        options = ["--nnodes", 2, "--master-port", port, "--node-rank", node, "--log-dir", "logs"]
        return bench.start(*options, waits, environment=SECRET)

    port = free_port()
    nodes = [start(1, port), start(0, port)]
    for node in nodes:
        node.wait_for("UP")
    for node in (0, 1):
        launch = start(node, free_port())
        assert launch.wait() == 2
        assert "in use by another run" in launch.err
    bench.go()
    assert [node.wait() for node in nodes] == [0, 0]
    assert len(bench.workers()) == 2


# -- folders of the script -------------------------------------------------------------------------------------------


def saving(folder, script="pretrain_gpt.py", **fields):
    words = ("--save", str(folder))
    more = {"nproc_per_node": 1, "fault_tolerant": False, "script_args": words, **fields}
    return spec_of(script=script, **more)


def test_a_second_launch_that_saves_into_a_folder_is_refused_until_the_first_has_ended(tmp_path, capsys):
    (first,), _ = command._lock_folders(saving(tmp_path / "new" / "checkpoints"))
    assert first.held
    with pytest.raises(UsageError, match=r"--save \S+/checkpoints is in use by another run \(recover-run with pid"):
        command._lock_folders(saving(tmp_path / "new" / "checkpoints", log_dir=tmp_path))
    die(first)  # as after kill -9: on this host its lock tells
    (again,), _ = command._lock_folders(saving(tmp_path / "new" / "checkpoints"))
    assert again.held
    die(again)
    assert capsys.readouterr().err == ""


def test_a_second_run_that_logs_where_another_does_is_refused_and_the_same_run_comes_again(tmp_path, monkeypatch):
    monkeypatch.setenv("RECOVER_LOG_DIR", str(tmp_path))  # no worker gets it

    def logging(name, **fields):
        """With its own --log-dir, and --recover-log-dir ``name``; the last word is the script's own."""
        folder, where = tmp_path / f"of-{fields['run_id']}", str(tmp_path / name)
        folder.mkdir(exist_ok=True)
        return spec_of(script_args=("--recover", "--recover-log-dir", where, "8"), log_dir=folder, **fields)

    ((first,), its) = command._lock_folders(logging("steps", run_id="1", nnodes=2))
    assert (first.folder, first.held) == (tmp_path / "steps", True)
    for name in ("steps", "of-1"):  # or where another has its --log-dir
        with pytest.raises(UsageError, match=rf"--recover-log-dir {tmp_path}/{name} is in use by another run \(rec"):
            command._lock_folders(logging(name, run_id="2"))
    ((mate,), _) = command._lock_folders(logging("steps", run_id="not known yet", nnodes=2, node_rank=1))
    assert (mate.share("1"), mate.held) == (None, True)
    for lock in (first, mate, its):
        die(lock)
    ((again,), its) = command._lock_folders(logging("steps", run_id="1"))
    assert command._lock_folders(logging("of-3", run_id="3"))[0] == []  # one folder, one lock
    for lock in (again, its):
        die(lock)


def test_other_nodes_share_the_folder_of_checkpoints_and_a_launcher_that_joins_is_not_kept_from_its_run(tmp_path):
    (first,), _ = command._lock_folders(saving(tmp_path, nnodes=2, run_id="of node 0"))
    (mate,), _ = command._lock_folders(saving(tmp_path, nnodes=2, node_rank=1))
    assert mate.share("of node 0") is None
    assert mate.held
    same = {"joins": (("a", 2),), "joined_world_size": 2}
    (joined,), _ = command._lock_folders(saving(tmp_path, **same))
    assert (joined.held, joined.run_id) == (False, "of node 0"), "it holds nothing until it has part in the run"
    assert joined.share("its own") is None
    assert joined.held
    assert command._lock_folders(saving(tmp_path, **same, master_addr="another name of a")) == ([], None)
    for held in (first, mate, joined):
        die(held)


def test_two_launchers_that_join_one_run_at_the_same_time_share_a_folder_of_their_own(tmp_path):
    same = {"joins": (("a", 2),), "joined_world_size": 2}
    ((one,), _), ((other,), _) = (command._lock_folders(saving(tmp_path, **same, run_id=name)) for name in "12")
    assert [lock.share(name) for lock, name in ((one, "1"), (other, "2"))] == [None, None]
    assert (other.held, other.run_id) == (True, "1"), "workers.json has the entries of both under one name"
    for lock in (one, other):
        die(lock)


def test_a_launch_whose_folder_has_no_lock_goes_on_and_says_so(tmp_path, capsys):
    (tmp_path / "file").touch()
    (lock,), _ = command._lock_folders(saving(tmp_path / "file"))
    assert (lock.held, lock.share("r"), lock.share("r")) == (False, None, None)
    said = capsys.readouterr().err
    assert said.count("another run that writes to this folder would not be noticed") == 1
    assert "Not a directory" in said


@pytest.mark.parametrize(
    ("folder", "fields"),
    [("msc://bucket/checkpoints", {}), ("logs", {"log_dir": True}), ("model.pt", {"script": "train.py"})],
)
def test_what_is_no_folder_of_checkpoints_of_its_own_gets_no_lock(tmp_path, monkeypatch, folder, fields):
    """The log folder has one already, and --save of another script may be anything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    fields = {**fields, **({"log_dir": tmp_path / "logs"} if "log_dir" in fields else {})}
    others, lock = command._lock_folders(saving(folder, **fields))
    assert others == []
    if lock:
        die(lock)
    assert sorted(os.listdir(tmp_path)) == ["logs"]


@pytest.mark.slow
def test_a_launch_that_saves_where_another_does_starts_nothing(bench):
    script = bench.script(UNTIL_TOLD, "pretrain_waits.py")
    first = bench.up(1, script, "--save", "checkpoints", logs="a")
    second = bench.run("--log-dir", "b", script, "--save", "checkpoints", ends=2)
    assert f"recover-run with pid {first.pid} on host" in second.err
    assert "UP" not in second.out
    first.send(signal.SIGKILL)
    first.wait()
    eventually(lambda: first.left() == [], "nothing is left of it")
    bench.go()
    third = bench.run("--log-dir", "b", script, "--save", "checkpoints")
    claim = json.loads((bench.folder / "checkpoints" / "launch.lock").read_text())
    assert (claim["ended"], claim["code"], claim["pid"]) == (True, 0, third.pid)


def worker(worker_id, state=WorkerState.RUNNING):
    return WorkerProcess(worker_id, 100 + worker_id, "host", state, 0, worker_id)


def write_workers(folder, run_id, workers):
    file = WorkersFile(folder, pytest.fail)
    file.put(run_id, workers)
    assert file.writing.flush()
    file.writing.close()


def ids(folder):
    return [entry["worker_id"] for entry in json.loads((folder / "workers.json").read_text())]


def test_entries_have_exactly_the_documented_fields(tmp_path):
    write_workers(tmp_path, "run", [worker(0)])
    known = {
        "worker_id": 0,
        "pid": 100,
        "host": "host",
        "state": "running",
        "node_rank": 0,
        "local_rank": 0,
        "note": "",
        "kernel": "",
    }
    unknown = ("exit_code", "signal", "started", "ended", "log", "rank", "replaces")
    assert json.loads((tmp_path / "workers.json").read_text()) == [{**known, **dict.fromkeys(unknown), "note": ""}]


@pytest.mark.parametrize(
    ("first", "numbers", "second", "more", "left"),
    [
        pytest.param("run", (2, 3), "run", (1, 0), [0, 1, 2, 3], id="launchers of one run merge and sort"),
        pytest.param("earlier", (0, 1, 2), "later", (0,), [0], id="entries of an earlier run are dropped"),
    ],
)
def test_which_entries_are_kept(tmp_path, first, numbers, second, more, left):
    write_workers(tmp_path, first, map(worker, numbers))
    write_workers(tmp_path, second, map(worker, more))
    assert ids(tmp_path) == left


def test_a_node_that_the_start_was_made_again_without_drops_no_entries_of_it(tmp_path):
    left_out, others = (log_folder.WorkersFile(tmp_path, pytest.fail) for _ in range(2))
    left_out.put("first", [worker(1)])
    others.put("again", [worker(0), worker(1)])
    left_out.put("first", [worker(1)])
    for file in (left_out, others):
        log_folder.flush_all([file.writing])
    assert ids(tmp_path) == [0, 1]


def test_a_damaged_file_is_replaced(tmp_path):
    write_workers(tmp_path, "run", [worker(0)])
    (tmp_path / "workers.json").write_text('[{"worker_id": ')
    write_workers(tmp_path, "run", [worker(1)])
    assert ids(tmp_path) == [1]


def test_a_reader_never_sees_a_partial_file_and_concurrent_writers_lose_nothing(tmp_path):
    write_workers(tmp_path, "run", [worker(0)])

    def write(first):
        for _ in range(50):
            write_workers(tmp_path, "run", [worker(first + number) for number in range(20)])

    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 20, 40)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert ids(tmp_path)  # json.loads raises on a partial file
    assert ids(tmp_path) == list(range(60))


HEX = "0123456789abcdef" * 4


def test_recover_status_reads_a_local_run_by_its_folder_alone(bench):
    launch = bench.up(2, bench.script(IN_THE_RUN), says="JOINED")
    secret = bench.folder / "logs" / "secret"
    eventually(secret.exists, "the secret is written")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    seen = bench.status("logs", "--json")
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout)["state"] == "steady"
    text = secret.read_text().strip()
    bench.go()
    assert launch.wait() == 0
    assert not secret.exists()
    for path in (bench.folder / "logs").iterdir():
        assert text not in path.read_text()
    assert json.loads(bench.status("logs", "--json").stdout)["code"] == 0


@pytest.mark.slow
def test_a_secret_of_the_users_is_written_nowhere_and_that_of_a_killed_launch_is_removed(bench):
    script = bench.script(IN_THE_RUN)
    secret = bench.folder / "logs" / "secret"
    launch = bench.up(1, script, says="JOINED")
    eventually(secret.exists, "the secret is written")
    launch.send(signal.SIGKILL)
    launch.wait()
    assert secret.exists()
    eventually(lambda: not launch.left(), "the end of the killed launch")
    launch = bench.up(1, script, environment={"RECOVER_SECRET": HEX}, says="JOINED")
    eventually(lambda: not secret.exists(), "that of the killed launch is removed")
    assert bench.status("logs").returncode == 2
    assert bench.status("logs", "--json", RECOVER_SECRET=HEX).returncode == 0
    bench.go()
    assert launch.wait() == 0


def written(folder):
    said, before = [], os.umask(0)
    file = SecretFile(folder, said.append)
    try:
        file.write(HEX)
        file.writing.flush()
    finally:
        os.umask(before)
    return said


def test_the_file_is_whole_and_private_whatever_the_umask(tmp_path):
    assert written(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").read_text() == HEX + "\n"
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "theirs").write_text("untouched")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "secret").symlink_to(tmp_path / "theirs")
    assert written(tmp_path / "logs") == []
    assert (tmp_path / "theirs").read_text() == "untouched"
    assert not (tmp_path / "logs" / "secret").is_symlink()


def test_a_file_of_the_users_stays(tmp_path):
    (tmp_path / "secret").write_text("a key of the user's\n")
    (said,) = written(tmp_path)
    assert "a file of that name, which no launch has written, exists" in said
    assert (tmp_path / "secret").read_text() == "a key of the user's\n"


def test_where_everybody_could_read_it_no_secret_is_left(tmp_path, monkeypatch):
    def open_to_all(path, flags, mode=0o777, **options):
        return original(path, flags, 0o666, **options)

    original = os.open
    monkeypatch.setattr(log_folder.os, "open", open_to_all)
    (said,) = written(tmp_path)
    assert "does not protect the file from other users" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["a file", "a folder in its place"])
def test_a_disk_that_does_not_take_it_costs_a_line(tmp_path, place):
    if place == "a file":
        (tmp_path / "logs").write_text("")
    else:
        (tmp_path / "logs" / "secret").mkdir(parents=True)
    (said,) = written(tmp_path / "logs")
    assert "cannot be written" in said
