"""Writers of checkpoints: nobody waits for a process that is dead or has nothing to do; what failed is told to all."""

from __future__ import annotations

import argparse
import errno
import io
import multiprocessing
import multiprocessing.util
import os
import queue
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_sharer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, PersistentAsyncCaller
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from recover_megatron.arguments import RecoverConfig
from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.megatron_hooks.checkpoint import checkpoint_writers
from recover_megatron.megatron_hooks.checkpoint.checkpoint_writers import (
    PartFailed,
    Parts,
    WriterDied,
    WriterKilled,
    WriterStopped,
    nothing,
    write,
)
from recover_megatron.megatron_hooks.checkpoint.checkpoints import _reason
from recover_megatron.megatron_hooks.data import source as data
from recover_megatron.megatron_hooks.entry import flags
from recover_megatron.megatron_hooks.gradients.microbatches import InOrder
from tests.harness.processes import python
from tests.harness.waiting import eventually

KILLED, FAILED = -9, 1


@dataclass
class Process:
    exitcode: int | None
    killed: bool = False
    pid: int = field(default_factory=os.getpid)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.killed = True


@dataclass
class Queue:
    """That of a process which never says that it has done what it was given."""

    items: list[Any] = field(default_factory=list)
    unread: queue.Queue[None] = field(default_factory=queue.Queue)

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.unread.put(None)

    def join(self) -> None:
        self.unread.join()


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> PersistentAsyncCaller:
    """Megatron's own, as the hooks wrap it, that has a process of ours."""
    wrapped = {
        PersistentAsyncCaller: ("schedule_async_call", "is_current_async_call_done", "close"),
        FileSystemWriterAsync: ("get_save_function_and_args", "retrieve_write_results"),
    }
    for owner, name in [(owner, name) for owner, names in wrapped.items() for name in names]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(filesystem_async, "get_write_results_queue", filesystem_async.get_write_results_queue)
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_queue", Queue())
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_preload_q", Queue())
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_comp_q", queue.Queue())
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_process", None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    checkpoint_writers.install(Parts())
    return PersistentAsyncCaller()


@pytest.mark.parametrize(("code", "kind"), [(KILLED, WriterKilled), (FAILED, WriterDied)])
@pytest.mark.parametrize("blocking", [False, True])
def test_whoever_asks_a_dead_one_is_told(
    caller: PersistentAsyncCaller, code: int, kind: type[WriterDied], blocking: bool
) -> None:
    caller.process = Process(code)  # type: ignore[assignment]
    with pytest.raises(WriterDied) as raised:
        caller.is_current_async_call_done(blocking, True)
    assert type(raised.value) is kind
    caller.close()


def test_what_one_has_told_before_it_died_counts(caller: PersistentAsyncCaller) -> None:
    caller.process = Process(KILLED)  # type: ignore[assignment]
    caller._persistent_comp_q.put(4)
    assert caller.is_current_async_call_done(True, True)
    caller.close()


def test_one_that_dies_while_it_copies_is_not_waited_for(caller: PersistentAsyncCaller) -> None:
    caller.process = process = Process(None)  # type: ignore[assignment]
    copied = caller._persistent_preload_q

    def put(item: Any) -> None:
        Queue.put(copied, item)  # type: ignore[arg-type]
        process.exitcode = KILLED

    copied.put = put
    with pytest.raises(WriterKilled):
        caller.schedule_async_call(AsyncRequest(print, (), [], preload_fn=list))
    assert caller._persistent_preload_q is copied
    caller.close()


def test_one_without_a_part_in_a_checkpoint_is_given_something_to_be_done_with(caller: PersistentAsyncCaller) -> None:
    caller.process = Process(None)  # type: ignore[assignment]
    caller.schedule_async_call(AsyncRequest(None, (), [], call_idx=6))
    (given,) = caller._persistent_queue.items
    assert (given.async_fn, given.async_fn_args, given.call_idx) == (nothing, (), 6)
    caller.process = None


def test_a_dead_one_with_a_checkpoint_that_nobody_wants_is_replaced(caller: PersistentAsyncCaller) -> None:
    caller.process = process = Process(FAILED)  # type: ignore[assignment]
    checkpoint_writers.wait(caller)
    assert process.killed
    assert caller.process is None


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """One that will not run until it is told to; nobody waits for it at all."""
    monkeypatch.setattr(checkpoint_writers, "watch", checkpoint_writers.Watch())
    checkpoint_writers.watch.seconds = 0
    with subprocess.Popen(["sleep", "1000"]) as sleeping:
        os.kill(sleeping.pid, signal.SIGSTOP)
        eventually(lambda: checkpoint_writers.is_stopped(sleeping.pid))
        yield Process(None, pid=sleeping.pid)
        sleeping.kill()


@pytest.mark.parametrize("blocking", [False, True])
def test_one_that_is_stopped_is_waited_for_as_long_as_the_hang_timeout(
    caller: PersistentAsyncCaller, stopped: Process, blocking: bool
) -> None:
    caller.process = stopped  # type: ignore[assignment]
    assert not caller.is_current_async_call_done(False, True)  # the first look
    with pytest.raises(WriterStopped, match=f"process {stopped.pid}, which writes checkpoints for this worker"):
        caller.is_current_async_call_done(blocking, True)
    caller.close()
    assert stopped.killed


def test_one_that_goes_on_was_not_stopped(caller: PersistentAsyncCaller, stopped: Process) -> None:
    caller.process = stopped  # type: ignore[assignment]
    for _ in range(2):  # however long both times are together
        assert not caller.is_current_async_call_done(False, True)
        os.kill(stopped.pid, signal.SIGCONT)
        eventually(lambda: not checkpoint_writers.is_stopped(stopped.pid))
        assert not caller.is_current_async_call_done(False, True)
        os.kill(stopped.pid, signal.SIGSTOP)
        eventually(lambda: checkpoint_writers.is_stopped(stopped.pid))
    checkpoint_writers.wait(caller)  # given up: nobody needs it
    assert stopped.killed


def test_a_stopped_one_that_is_to_copy_is_not_waited_for(caller: PersistentAsyncCaller, stopped: Process) -> None:
    caller.process = stopped  # type: ignore[assignment]
    with pytest.raises(WriterStopped):
        caller.schedule_async_call(AsyncRequest(print, (), [], preload_fn=list))
    caller.close()


def test_the_process_that_keeps_what_was_written_is_watched_as_well(
    caller: PersistentAsyncCaller, stopped: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = SimpleNamespace(_manager=SimpleNamespace(_process=stopped))
    monkeypatch.setattr("megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue", keeper)
    caller.process = Process(None)  # type: ignore[assignment]
    with pytest.raises(WriterStopped, match=f"process {stopped.pid}"):
        caller.is_current_async_call_done(True, True)
    with pytest.raises(WriterStopped):
        checkpoint_writers.watch.wait()
    stopped.exitcode, caller.process = KILLED, Process(FAILED)  # type: ignore[assignment]
    stopped.pid = os.getpid()
    with pytest.raises(WriterKilled, match="lost its manager process"):
        caller.is_current_async_call_done(True, True)
    caller.close()


@pytest.mark.parametrize("number", [1, 2])
def test_a_part_that_cannot_be_written_is_told_with_its_cause_whichever_thread_writes_it(
    tmp_path: Path, number: int
) -> None:
    """The last file is written in the main thread."""
    paths = [tmp_path / "none" / "0.distcp", *[tmp_path / "1.distcp"] * (number - 1)]
    item = WriteItem(MetadataIndex("x"), WriteItemType.BYTE_IO)
    buckets = [(str(path), path.name, ([(item, io.BytesIO(b"x"))], [])) for path in paths]
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    save = partial(FileSystemWriterAsync.write_preloaded_data_multithread, [_StorageWriterTransforms()], False)
    write(save, 0, buckets, results)
    told = results.get()
    assert f"FileNotFoundError: [Errno 2] No such file or directory: '{paths[0]}' (in {paths[0]})" in str(told)
    buckets[0] = (str(tmp_path / "0.distcp"), "0.distcp", ([(item, io.BytesIO(b"x"))], []))
    write(save, 0, buckets, results)
    assert sorted(results.get()) == list(range(number))


COLLECTED = """
import gc, io, queue, sys
from functools import partial
from types import SimpleNamespace

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from recover_megatron.megatron_hooks.checkpoint.checkpoint_writers import PartFailed, Parts, write

def megatrons(threads):
    buckets = [
        ("/dev/full", "full", ([(WriteItem(MetadataIndex("x"), WriteItemType.BYTE_IO), io.BytesIO(bytes(100000)))], []))
        for _ in range(threads)
    ]
    results = queue.SimpleQueue()
    write(partial(FileSystemWriterAsync.write_preloaded_data_multithread, [_StorageWriterTransforms()], False), 0,
          buckets, results)
    return results.get()

class Full(FileSystemWriter):
    def prepare_global_plan(self, plans):
        self.path = self.fs.init_path("/dev")
        self.fs.concat_path = lambda path, name: "/dev/full"
        return super().prepare_global_plan(plans)

def torchs():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    manager = SimpleNamespace(view=SimpleNamespace(decision=SimpleNamespace(workers=[0])))
    try:
        with Parts().share_failures(manager):
            save({"x": b"x" * 100000}, storage_writer=Full(sys.argv[1]))
    except PartFailed as error:
        return str(error)

gc.disable()  # until what has failed is nobody's any more
for name, fails in {"one": partial(megatrons, 1), "two": partial(megatrons, 2), "torch": torchs}.items():
    told = fails()
    gc.collect()
    assert "No space left on device" in str(told), told
    print(name, flush=True)
"""


def test_the_garbage_collector_survives_a_part_that_cannot_be_written(tmp_path: Path) -> None:
    """By Megatron's writer with one thread or two, and by torch's own."""
    script = tmp_path / "program.py"
    script.write_text(COLLECTED)
    done = python(script, tmp_path / "checkpoint")
    assert (done.stdout, done.returncode) == ("one\ntwo\ntorch\n", 0), done.stderr
    assert "exported buffer" not in done.stderr
    assert "Existing exports" not in done.stderr


class Peers:
    """Stand-ins for the operations of four workers, 10 to 13; ``idle``: ranks without a part."""

    def __init__(self, me: int, failures: dict[int, str], idle: set[int]) -> None:
        self._told = [({}, rank in idle) for rank in range(4)]
        errors = {rank: _wrap_exception(RuntimeError(f"Worker failure: {text}")) for rank, text in failures.items()}
        self.error = CheckpointException("write", errors if me == 0 else {})
        self._told[0] = (failures, 0 in idle)
        self._me = me
        groups = SimpleNamespace(any=self._any)
        decision = SimpleNamespace(workers=[10, 11, 12, 13])
        self.manager: Any = SimpleNamespace(
            view=SimpleNamespace(groups=groups, decision=decision, live={10, 11, 12, 13})
        )

    def all_gather_object(self, told: list[Any], mine: Any) -> None:
        assert mine[0] == self._told[self._me][0]
        told[:] = self._told

    def _any(self, value: bool, live: tuple[int, ...]) -> bool:
        raise EpochRevoked("others have ended")


ALL = {rank: f"no {rank}" for rank in range(4)}


@pytest.mark.parametrize(
    ("failures", "idle", "ends", "own"),
    [
        ({2: "no 2"}, set(), {2: "worker 12: no 2"}, True),
        ({1: "no 1", 2: "no 2"}, {3}, {1: "worker 11: no 1", 2: "worker 12: no 2"}, True),
        ({0: "no 0"}, {1, 2, 3}, dict.fromkeys(range(4), "worker 10: no 0"), False),
        (ALL, set(), {rank: f"worker {10 + rank}: no {rank}" for rank in range(4)}, False),
    ],
    ids=["one", "two", "the only one that writes", "all"],
)
def test_who_cannot_write_its_part_ends_where_others_can_else_all(
    monkeypatch: pytest.MonkeyPatch, failures: dict[int, str], idle: set[int], ends: dict[int, str], own: bool
) -> None:
    for me in range(4):
        peers, parts = Peers(me, failures, idle), Parts()
        monkeypatch.setattr("torch.distributed.get_rank", lambda me=me: me)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
        monkeypatch.setattr("torch.distributed.all_gather_object", peers.all_gather_object)
        with pytest.raises((PartFailed, EpochRevoked)) as raised, parts.share_failures(peers.manager):
            raise peers.error
        if me in ends:
            assert isinstance(raised.value, PartFailed)
            assert (str(raised.value), raised.value.own) == (ends[me], own)
        else:
            assert isinstance(raised.value, EpochRevoked)


def test_a_manager_that_is_gone_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The killed manager leaves its folder of sockets.
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", str(tmp_path))
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    wrapped = checkpoint_writers._results_queue(filesystem_async.get_write_results_queue)
    first = wrapped("fork")
    assert wrapped("fork") is first
    first._manager._process.kill()
    first._manager._process.join()
    second = wrapped("fork")
    second.put("written")
    assert second.get() == "written"
    second._manager.shutdown()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EDQUOT, errno.ENOSPC])
def test_what_the_file_system_says_is_everybodys_whatever_it_means_elsewhere(tmp_path: Path, number: int) -> None:
    """A worker's own would cost one replica after the other."""
    words = os.strerror(number)
    folder = str(tmp_path / "attempt_4")
    why, own = _reason(OSError(number, words, folder, None, str(tmp_path / "iter_4")), str(tmp_path))
    assert words in why
    assert not own


def test_a_full_table_of_descriptors_is_a_workers_own() -> None:
    assert _reason(OSError(errno.EMFILE, "Too many open files"), "/nowhere")[1]


@pytest.mark.parametrize("others_can", [True, False])
@pytest.mark.parametrize(
    ("text", "full"),
    [("Input/output error", False), ("Disk quota exceeded", True), ("No space left on device", True)],
)
def test_a_part_that_others_can_write_is_the_workers_own_if_there_is_space(
    text: str, full: bool, others_can: bool
) -> None:
    why, own = _reason(PartFailed(f"worker 2: OSError: {text}", own=others_can), "/nowhere")
    assert text in why
    assert own is (others_can and not full)


PROGRAM = """
import multiprocessing, os, signal, sys
from multiprocessing import resource_tracker

from recover_megatron.megatron_hooks.data import children

def echo(pipe, number):
    signal.signal(number, lambda *_: None)  # as Megatron has its loaders do
    while True:
        pipe.send((pipe.recv(), number in signal.pthread_sigmask(signal.SIG_BLOCK, [])))

def main(number):
    children.install()
    heard = []
    signal.signal(number, lambda *_: heard.append(1))
    if number == signal.SIGUSR1:  # else it is started with the first process that needs it
        resource_tracker.ensure_running()
    started = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        mine, its = context.Pipe()
        context.Process(target=echo, args=(its, number), daemon=True).start()
        mine.send("up")
        assert mine.recv() == ("up", True), method
        started[method] = mine, context.Manager().Queue()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    tracker = resource_tracker._resource_tracker._pid
    os.killpg(0, number)
    assert heard == [1]
    for mine, queue in started.values():
        mine.send("here")
        assert mine.recv() == ("here", True)
        queue.put("told")
        assert queue.get() == "told"
    assert os.waitpid(tracker, os.WNOHANG) == (0, 0)
    print("all are left", flush=True)

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_what_a_worker_handles_ends_none_of_its_children_and_they_end_with_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = python(script, int(number))
    assert (done.stdout, done.returncode) == ("all are left\n", 0), done.stderr


def deaf(_: int) -> None:
    """As Megatron has its loaders be."""
    signal.signal(signal.SIGTERM, lambda *_: None)


def test_loaders_end_with_the_training_whoever_still_refers_to_them() -> None:
    samples = data.TaggedDataset([{"n": torch.tensor(n)} for n in range(8)])
    loader = torch.utils.data.DataLoader(
        samples, batch_size=2, num_workers=2, persistent_workers=True, worker_init_fn=deaf
    )
    source = data.Source(loader, 2, 0, InOrder(8, 2))
    source.begin(0, [0, 1], 2)
    assert source.get(1)["n"].tolist() == [2, 3]
    assert len(multiprocessing.active_children()) == 2
    data.finish()
    assert multiprocessing.active_children() == []


def test_what_listens_on_sockets_that_somebody_has_removed_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cleaner of TMPDIR, while the run goes on."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
    monkeypatch.setattr(resource_sharer, "_resource_sharer", resource_sharer._ResourceSharer())
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    results = filesystem_async.get_write_results_queue("fork")
    lent, other = os.pipe()
    resource_sharer.DupFd(lent).detach()
    checkpoint_writers.without_lost_sockets()
    assert filesystem_async.get_write_results_queue("fork") is results

    gone = [results._manager.address, resource_sharer._resource_sharer._address]
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    checkpoint_writers.without_lost_sockets()
    again = filesystem_async.get_write_results_queue("fork")
    ctx = multiprocessing.get_context("fork")
    writer = ctx.Process(target=os.write, args=(os.dup(resource_sharer.DupFd(other).detach()), b"x"))
    writer.start()
    writer.join()
    assert os.read(lent, 1) == b"x"
    again.put(1)
    assert again.get() == 1
    assert not results._manager._process.is_alive()
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(path in line for path in gone)
    checkpoint_writers.without_lost_sockets()
    assert filesystem_async._results_queue is again
    again._manager.shutdown()


@pytest.mark.parametrize("by", ["another user", "a full disk"])
def test_a_folder_that_cannot_be_had_again_ends_nothing_and_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    """Another user of the host may make the removed folder before us: what lies there is not to be followed."""
    sharer = resource_sharer._ResourceSharer()
    sharer._address = str(tmp_path / "listener")
    monkeypatch.setattr(resource_sharer, "_resource_sharer", sharer)
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    monkeypatch.setattr(checkpoint_writers, "get_temp_dir", lambda: str(tmp_path))
    if by == "another user":
        monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    else:
        monkeypatch.setattr(os, "makedirs", lambda *_, **__: os.mkdir("/dev/null/full"))
    checkpoint_writers.without_lost_sockets()
    assert list(tmp_path.iterdir()) == []
    assert sharer._address == str(tmp_path / "listener")
    assert "cannot replace socket files in TMPDIR" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("length", [107, 108])
def test_a_tmpdir_in_which_a_manager_cannot_listen_is_refused_at_the_start_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int
) -> None:
    """The longest path of a socket has 107 bytes."""
    made = set(multiprocessing.util._finalizer_registry)
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
    args = argparse.Namespace(save=str(tmp_path), ckpt_format="torch_dist")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = f"{short}/".ljust(length - len("/pymp-12345678/listener-12345678"), "t")
        os.mkdir(folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        found = flags._folders(args, RecoverConfig())
        try:
            multiprocessing.get_context("fork").Manager().shutdown()
        except EOFError:
            (reason,) = found
            assert f"TMPDIR {folder}: AF_UNIX path too long" in reason
        else:
            assert found == []
        assert flags._folders(argparse.Namespace(save=None, ckpt_format="torch_dist"), RecoverConfig()) == []
        assert flags._folders(argparse.Namespace(save=str(tmp_path), ckpt_format="torch"), RecoverConfig()) == []
        for each in set(multiprocessing.util._finalizer_registry) - made:  # they remove what is in the folder
            multiprocessing.util._finalizer_registry[each]()
