"""Alterations of a script (``altered``) by which something of a worker's is broken: its device, memory or data.

Megatron is imported where it is needed: a checkpoint's writers, processes of their own, may import this module.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.state.trees import flatten
from recover_megatron.instep.state.snapshots import SnapshotStore
from tests.harness.patience import patient
from tests.harness.processes import processes_with


def kill_me(*unused: Any, **unused_too: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def whole_node(workers: str, mark: str) -> None:
    """Have a kill of one of these workers (comma-separated) take its node: all processes with its value of ``mark``.

    As a host that loses its power: all stand still before the first one is killed, so nobody tells of another's death.
    ``mark``: a variable with which all processes of a launcher are started, and no other.
    """
    from recover_megatron.chaos.spec import Injector, Kind, log
    from tests.instep.pacing import log_folder

    inject, me = Injector._inject, os.environ["RECOVER_WORKER_ID"]

    def inject_everywhere(self: Injector, fault: Any) -> None:
        if fault.kind is Kind.KILL:
            log.info(f"injected fault {fault}")  # by the launcher, which has to live until it has written that
            while f"injected fault {fault}" not in (log_folder() / f"worker-{me}.log").read_text():
                time.sleep(0.01)
            # The launcher last: the kernel kills its workers, this one, too, when it ends.
            others = sorted({*processes_with(f"{mark}={os.environ[mark]}")} - {os.getpid()}, key=os.getppid().__eq__)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in others:
                    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                        os.kill(pid, number)
        inject(self, fault)

    if me in workers.split(","):
        Injector._inject = inject_everywhere  # type: ignore[method-assign]


def stop_me(*unused: Any, **unused_too: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def linger() -> None:
    """Have each injected kill stop this worker instead: the fork server then counts it as dead (``Case.lingers``)."""
    from recover_megatron.chaos.spec import Injector

    inject = Injector._inject

    def stop(self: Injector, fault: Any) -> None:
        kill, os.kill = os.kill, lambda pid, number: kill(pid, signal.SIGSTOP)
        inject(self, fault)

    Injector._inject = stop  # type: ignore[method-assign]


def giving(worker: str, how: str) -> None:
    """Have that worker of the launch be killed, or stopped, in the middle of a state that it gives; ``how``: as above.

    All workers: have states go in small chunks.
    """
    from recover_megatron.collectives.state import holder as state_holder

    state_holder.CHUNK = 1 << 10
    parts, left = state_holder.Offer.parts, [3]

    def counted(self: Any, number: int) -> Any:
        left[0] -= 1
        if not left[0]:
            (stop_me if how == "stop" else kill_me)()
        return parts(self, number)

    if os.environ["RANK"] == worker and "RECOVER_JOIN" not in os.environ:
        state_holder.Offer.parts = counted  # type: ignore[method-assign]


def idle(replica: str) -> None:
    """Have that replica run no microbatch: the first of the others runs its share."""
    idle_from(replica, "1")


def idle_from(replica: str, first: str) -> None:
    """The same from the first plan that is made in iteration ``first`` or later."""
    from megatron.training import get_args

    from recover_megatron.instep.meeting.assignment import Quotas

    counts = Quotas.counts

    def without(self: Quotas, *args: Any) -> dict[int, int]:
        found, still = dict(counts(self, *args)), int(replica)
        late = get_args().curr_iteration + 1 >= int(first)
        if late and still in found and (others := set(found) - {still}):
            found[min(others)] += found[still]
            found[still] = 0
        return found

    Quotas.counts = without  # type: ignore[method-assign]


def beside_step(
    worker: str, iteration: str, before: Callable[[], None] = lambda: None, after: Callable[..., None] = lambda *_: None
) -> None:
    """Have that worker of the launch call ``before`` and, with the step's arguments, ``after`` a step."""
    from megatron.training import get_args, training

    train_step = training.train_step

    def train_step_and_more(*args: Any, **kwargs: Any) -> Any:
        now = get_args().curr_iteration + 1 == int(iteration)
        if now:
            before()
        result = train_step(*args, **kwargs)
        if now:
            after(*args)
        return result

    if os.environ["RANK"] == worker and "RECOVER_JOIN" not in os.environ:
        # What --recover wraps is checked by its parameters: keep those of the original.
        train_step_and_more.__wrapped__ = train_step  # type: ignore[attr-defined]
        training.train_step = train_step_and_more


def in_dispatch(worker: str, iteration: str, visit: str) -> None:
    """Kill that worker of the launch where it sends tokens to their experts for the ``visit``-th time in an iteration.

    By --overlap-moe-expert-parallel-comm: from the second microbatch on in the middle of a backward pass, too.
    """
    from megatron.core.models.common.utils import TransformerLayerNode
    from megatron.training import get_args

    forward, left = TransformerLayerNode.forward, [int(visit)]

    def counted(self: Any, *inputs: Any) -> Any:
        if self.name == "moe_dispatch" and get_args().curr_iteration + 1 == int(iteration):
            left[0] -= 1
            if not left[0]:
                kill_me()
        return forward(self, *inputs)

    if os.environ.get("RANK") == worker:
        TransformerLayerNode.forward = counted


def in_shard_group(worker: str, iteration: str, operation: str, visit: str, how: str) -> None:
    """Have that worker of the launch be killed, or stopped, at an operation inside its shard group of Megatron-FSDP.

    At the ``visit``-th call in an iteration of that function of torch.distributed; ``how``: kill or stop.
    """
    from megatron.training import get_args

    original, left = getattr(dist, operation), [int(visit)]

    def counted(*args: Any, **kwargs: Any) -> Any:
        if getattr(get_args(), "curr_iteration", -1) + 1 == int(iteration):
            left[0] -= 1
            if not left[0]:
                (stop_me if how == "stop" else kill_me)()
        return original(*args, **kwargs)

    if os.environ["RANK"] == worker:
        setattr(dist, operation, counted)


def broken_device() -> None:
    """Have every orphan find its device broken when it comes out of the training."""
    from recover_megatron.megatron_hooks.loop import rejoin

    def check_device(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    rejoin.check_device = check_device


def poor_host(worker: str) -> None:
    """Have a worker see 1,000 bytes of memory on its host."""
    from recover_megatron.megatron_hooks.checkpoint import memory_tier

    if os.environ["RANK"] == worker:
        memory_tier.available_memory = lambda: 1000


def newcomer(victim: str) -> None:
    """Have a worker killed when it has to build a position's model."""
    from recover_megatron.megatron_hooks.entry.fault_tolerance import FaultTolerance

    build = FaultTolerance._build_for

    def build_for(self: FaultTolerance, *position: Any) -> None:
        build(self, *position)
        kill_me()

    if os.environ.get("RECOVER_WORKER_ID", os.environ["RANK"]) == victim:
        FaultTolerance._build_for = build_for  # type: ignore[method-assign]


# ---- memory and data


def corrupt(what: str, worker: str, iteration: str) -> None:
    """Have the memory of a worker be bad.

    parameter        after that iteration one of its parameters is another one
    shadow           ... a moment in the copy that it keeps of somebody else's part of the state
    snapshot-PART    before that iteration a byte changes in that part of the newest snapshot that it holds
    """

    @torch.no_grad()
    def corrupt_snapshot() -> None:
        part = int(what.partition("-")[2])
        (store,) = (one for one in gc.get_objects() if isinstance(one, SnapshotStore))
        assert store._job.over.wait(patient(60))
        newest = max(one.iteration for one in store._held)
        (held,) = (one for one in store._held if (one.part, one.iteration) == (part, newest))
        next(tensor for tensor in flatten(held.tree["state"])[1] if tensor.dim()).view(torch.uint8).view(-1)[0] ^= 1

    @torch.no_grad()
    def corrupt_shadow(forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, *unused: Any) -> None:
        one = getattr(optimizer, "chained_optimizers", [optimizer])[0]
        fragments = one._copy_main_params_to_model_params.__self__
        _, shadowed = fragments.held
        fragments.held[shadowed][0].state["exp_avg"].view(-1)[0] += 1.0

    @torch.no_grad()
    def corrupt_parameter(forward_step_func: Any, data_iterator: Any, model: Any, *unused: Any) -> None:
        next(model[0].parameters()).view(-1)[0] += 1.0

    if what.startswith("snapshot"):
        beside_step(worker, iteration, before=corrupt_snapshot)
    else:
        beside_step(worker, iteration, after={"shadow": corrupt_shadow, "parameter": corrupt_parameter}[what])


def spoil(worker: str, iteration: str, under: str) -> None:
    """Have a worker cut, before that iteration, all files of the checkpoint that the tracker file names.

    ``under``: of which folder of --save; ".": that itself.
    """
    from megatron.training import get_args

    def cut() -> None:
        folder = Path(get_args().save) / under
        newest = int((folder / "latest_checkpointed_iteration.txt").read_text())
        for path in (folder / f"iter_{newest:07d}").rglob("*.*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)

    beside_step(worker, iteration, before=cut)


def poison(what: str, sample: str) -> None:
    """Have one bad sample to train on.

    raise        reading the sample raises
    words        reading it raises, in words of each worker's own
    exit         reading it ends the process, as if all were well
    connection   reading it raises the error of a connection: that to where samples come from
    nan          its loss is no number
    glitch       its loss is no number on worker 1, as where a device computes wrongly
    gradient     its gradient is no number, its loss is one
    transport    the forward pass raises an error of the replica's transport
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split
    from megatron.core.models.gpt import GPTModel

    read, forward = GPTDataset.__getitem__, GPTModel.forward
    rotten: list[torch.Tensor] = []

    def __getitem__(self: Any, index: int) -> Any:
        found = read(self, index)
        if index != int(sample) or self.index_split is not Split.train:
            return found
        if what == "raise":
            raise ValueError(f"sample {index} is rotten")
        if what == "words":
            raise ValueError("".join(random.SystemRandom().choices(string.ascii_lowercase, k=12)))
        if what == "exit":
            sys.exit()
        if what == "connection":
            raise ConnectionResetError(104, "Connection reset by peer")
        if what == "nan" or (what == "glitch" and os.environ["RANK"] == "1"):
            return {**found, "loss_mask": torch.full_like(found["loss_mask"], float("nan"))}
        if what != "glitch":
            rotten.append(found["tokens"])
        return found

    def model_forward(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, input_ids, *args, **kwargs)
        if rotten and torch.equal(input_ids[0], rotten[0]):
            if what == "transport":
                raise RuntimeError("[.../gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4")
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output

    GPTDataset.__getitem__ = __getitem__
    GPTModel.forward = model_forward
