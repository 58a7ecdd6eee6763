"""Doubles of torch's process group over NCCL, for CPU: what it does when a member dies, not what it computes; and of
how torch chooses its kind.

    group.allreduce(...)   LAUNCHING --the members are there--> Work, over
                              |  '--one is dead---------------> Work that nothing ends but an abort
                              '--aborted meanwhile------------> spins, then raises

Members are threads of one process, which share a ``Fabric``.  The sources named are those of torch 2.13:
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and NCCLUtils.cpp, .hpp.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from tests.doubles.nccl.streams import current_device

ABORTED = "NCCL communicator was aborted on rank {rank}."


class Fabric:
    """What the members of a group share: who is dead, and where calls are held."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.dead: set[int] = set()
        self.held_in_launch: set[int] = set()
        """Ranks whose next call stays in its group launch: a member has not come to connect."""

    def kill(self, rank: int) -> None:
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


class WorkDouble:
    """What an operation returns."""

    def __init__(self, group: ProcessGroupNcclDouble, *, over: bool) -> None:
        self._group = group
        self._over = over
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        # WorkNCCL::isCompleted: "return exception() || finishedGPUExecutionInternal()": true of one that failed, too;
        # and an aborted kernel counts as one that has finished.
        return self._error is not None or self._over or self._group.aborted

    def exception(self) -> Exception | None:
        return self._error

    def wait(self) -> bool:
        # WorkNCCL::synchronize: the current stream waits for the operation, the host does not; an exception that the
        # watchdog has found is raised (WorkNCCL::handleException), one that it has not found yet is not.
        if self._error is not None:
            raise self._error
        return True


class ProcessGroupNcclDouble:
    """Of one member.  ``environ``: where torch's variables are read, as by its constructor and its static functions."""

    def __init__(self, fabric: Fabric, rank: int, size: int, name: str, environ: Mapping[str, str]) -> None:
        self.group_name = self.group_desc = name
        self._fabric = fabric
        self._rank, self._size = rank, size
        # nccl_nonblocking_timeout (NCCLUtils.cpp): seconds, 30 minutes where it is not set
        self._nonblocking = float(environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", 30 * 60))
        # Watchdog (ProcessGroupNCCL.cpp): waitTimeoutDumpInMilSec_, one minute where it is not set
        self._dump_seconds = float(environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 60_000)) / 1000
        self._communicator = threading.Lock()
        """NCCLComm::mutex_"""
        self._works = threading.Lock()
        """ProcessGroupNCCL::workMetaListMutex_"""
        self._under_way: list[WorkDouble] = []
        self.aborted = self.connected = False
        self.aborts = 0
        self.aborted_on = -1
        """The device that was current in the thread that aborted it."""
        self.launching = threading.Event()
        """Set while a call is in a group launch, for tests to wait for."""

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text

    def _get_backend(self, device: Any) -> ProcessGroupNcclDouble:
        return self

    def eager_connect_single_device(self, device: Any) -> None:
        # ProcessGroupNCCL::eagerConnectSingleDevice: initNCCLComm, which waits until the communicator is ready.
        self._launch()
        self.connected = True

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: Any, *options: Any) -> WorkDouble:
        self._launch()
        with self._fabric.changed:
            over = not self._fabric.dead
        work = WorkDouble(self, over=over)
        # ProcessGroupNCCL::workEnqueue takes workMetaListMutex_: it blocks as long as the watchdog has it.
        with self._works:
            self._under_way.append(work)
        return work

    def _launch(self) -> None:
        """ncclGroupEnd, and the wait until the communicator is ready."""
        with self._communicator:
            # NCCLComm::getNcclComm and waitReady hold mutex_ while a non-blocking communicator becomes ready.
            if self.aborted:
                raise dist.DistBackendError(ABORTED.format(rank=self._rank))
        if self._rank not in self._fabric.held_in_launch:
            return
        self.launching.set()
        with self._fabric.changed:
            # C10D_NCCL_CHECK_TIMEOUT_GROUPEND (NCCLUtils.hpp): asks ncclCommGetAsyncError again and again and ignores
            # what that call itself returns.  After an abort the communicator is null: the state stays
            # ncclInProgress, and the loop ends by the timeout alone.
            ready = self._fabric.changed.wait_for(lambda: self._rank not in self._fabric.held_in_launch,
                                                  self._nonblocking)  # fmt: skip
        self.launching.clear()
        if self.aborted:
            raise dist.DistBackendError(ABORTED.format(rank=self._rank))
        if not ready:
            raise dist.DistBackendError("NCCL timeout in: NCCLUtils.hpp")

    def hold_communicator(self) -> threading.Lock:
        """NCCLComm::mutex_, as a call holds it that waits for a communicator to become ready (waitReady)."""
        return self._communicator

    def watch(self) -> None:
        """One round of the watchdog (Watchdog::runLoop), which torch makes every 100 ms (kWatchdogThreadSleepMillis).

        Only here an error becomes known, so get_error and Work.exception tell of it late.  For each failed work it
        sleeps waitTimeoutDumpInMilSec_ with workMetaListMutex_ held, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING says.
        """
        with self._works:
            for work in list(self._under_way):
                if self._fabric.dead and not work._over:
                    work._error = dist.DistBackendError(
                        "NCCL error: remote process exited or there was a network error"
                    )
                    self._under_way.remove(work)
                    with self._fabric.changed:
                        self._fabric.changed.wait_for(lambda: False, self._dump_seconds)

    def abort(self) -> None:
        """ProcessGroupNCCL::abort: NCCLComm::abort takes mutex_, so it waits for a call that has it."""
        self.aborts += 1
        self.aborted_on = current_device()
        with self._communicator:
            self.aborted = True


class TwoKinds:
    """Of torch.distributed and its distributed_c10d, as far as they choose what "nccl" is, in torch 2.14 or 2.15.

    distributed_c10d.py of 2.14.1 and 2.15.0: Backend._ensure_backend_registered, _register_builtin_nccl_backend.
    """

    ProcessGroupNCCL2 = object

    def __init__(self, version: str) -> None:
        self._version = version
        self.Backend = type("Backend", (str,), {"_plugins": {}})

    @staticmethod
    def _create_nccl_process_group() -> None: ...

    @staticmethod
    def _create_nccl2_process_group() -> None: ...

    def BackendConfig(self, name: str) -> None:
        """The name is used: the first time what it means is settled for good."""
        value = os.environ.get("TORCH_DIST_USE_NCCL2")
        second = value == "1" if self._version == "2.14" else value != "0"
        creator = self._create_nccl2_process_group if second else self._create_nccl_process_group
        self.Backend._plugins.setdefault(name.upper(), SimpleNamespace(creator_fn=creator))
