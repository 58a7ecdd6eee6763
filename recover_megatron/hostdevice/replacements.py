"""Table of the functions that the host device replaces in torch, each with its reason.  This module imports torch.

With the replacements, ``torch.cuda`` describes one simulated device whose memory is ordinary host memory: a tensor that
is moved to "cuda" stays a CPU tensor, and streams and events are always finished.  Plain functions are replaced, so a
replacement applies in every thread, and costs no time unless it is called.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


@dataclass(frozen=True)
class Replacement:
    """Replacement of the attribute ``name`` of ``owner`` by ``value``; ``why``: its reason."""

    owner: Any
    name: str
    value: Any
    why: str

    @property
    def path(self) -> str:
        classes = {torch.Tensor: "torch.Tensor", dist.ProcessGroupGloo: "torch.distributed.ProcessGroupGloo"}
        owner = classes.get(self.owner, self.owner.__name__)
        return f"{owner}.{self.name}"


def _on_host(device: Any) -> Any:
    """Return the CPU in place of a CUDA device (a name, an index or a ``torch.device``), any other device unchanged."""
    if isinstance(device, int) or (isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"):
        return torch.device("cpu")
    return device


def _placed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_host(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


class Stream:
    """Replacement of ``torch.cuda.Stream``: a stream whose work is always finished."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments of ``torch.cuda.Stream``."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record_event(self, event: Any = None) -> Any:
        return Event() if event is None else event

    def synchronize(self, *args: Any, **kwargs: Any) -> None:
        """Return without waiting, since a stream's work is always finished."""

    wait_stream = wait_event = synchronize


class Event:
    """Replacement of ``torch.cuda.Event``: an event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments of ``torch.cuda.Event``."""

    def synchronize(self, *args: Any, **kwargs: Any) -> None:
        """Return without waiting, since an event has always happened."""

    record = wait = synchronize


def table() -> list[Replacement]:
    """Return all replacements.  Call it once, before any is applied: replacements call the functions they replace."""
    rows: list[Replacement] = []

    def row(owner: Any, why: str, **values: Any) -> None:
        rows.extend(Replacement(owner, name, value, why) for name, value in values.items())

    _tensors(row)
    _device(row)
    _random(row)
    _gloo(row)
    _reductions(row)
    row(
        torch,
        "Megatron calls torch.compile for its fused functions, which would need a C++ compiler on the host",
        compile=lambda model=None, **options: (lambda function: function) if model is None else model,
    )
    return rows


def _tensors(row: Callable[..., None]) -> None:
    placed = "device='cuda', or a device index, selects the host, whose memory is not pinned"
    for name in ("arange", "empty", "empty_like", "ones", "rand", "tensor", "zeros"):
        row(torch, placed, **{name: _placed(getattr(torch, name))})
    tensor = torch.Tensor
    tensor_to, tensor_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, int, torch.device)):
            args = (_on_host(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_host(kwargs["device"])
        return tensor_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    row(tensor, placed, new_empty=_placed(tensor.new_empty), to=to)
    row(tensor, "every tensor is already on the device", cuda=lambda self, *args, **kwargs: self)
    row(tensor, "no stream uses a tensor's memory asynchronously", record_stream=lambda self, stream: None)
    row(tensor, "Megatron's optimizers sort parameters by the name 'torch.cuda.FloatTensor'", type=type_)


def _device(row: Callable[..., None]) -> None:
    cuda = torch.cuda
    # Below capability 10, Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism.
    properties = types.SimpleNamespace(name="host", major=10, minor=0)
    row(
        cuda,
        "there is one device, index 0",
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_properties=lambda device=None: properties,
    )
    row(cuda.random, "torch.cuda's RNG functions call torch.cuda.random.current_device", current_device=lambda: 0)
    only_stream = Stream()
    row(
        cuda,
        "an operation on the device has finished when its call returns",
        synchronize=lambda device=None: None,
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: only_stream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    row(cuda, "there are no CUDA graphs", is_current_stream_capturing=lambda: False)
    row(cuda, "the host has no cache to empty, and torch without CUDA lacks this function", empty_cache=lambda: None)
    uncounted = "the device's memory is not counted, so Megatron reports 0"
    row(cuda, uncounted, device_memory_used=lambda device=None: 0)
    none = {name: {"all": {"current": 0, "peak": 0}} for name in ("reserved_bytes", "allocated_bytes", "allocation")}
    row(cuda.memory, uncounted, memory_stats_as_nested_dict=lambda device=None: none)
    row(torch.accelerator, "data loaders would pin memory if there were an accelerator", is_available=lambda: False)


def _random(row: Callable[..., None]) -> None:
    # Kernels on the CPU draw from torch.default_generator, which serves as the device's; the host gets a new generator.
    device_generator, host_generator = torch.default_generator, torch.Generator()
    seed_both, random_ = torch.manual_seed, torch.Tensor.random_

    def manual_seed(seed: int) -> torch.Generator:
        host_generator.manual_seed(seed)
        return seed_both(seed)

    row(
        torch.cuda,
        "torch.cuda's RNG functions use these two values, and are not replaced",
        _initialized=True,
        default_generators=(device_generator,),
    )
    row(
        torch,
        "the host and the device have separate generators",
        get_rng_state=host_generator.get_state,
        set_rng_state=host_generator.set_state,
        manual_seed=manual_seed,
    )
    row(
        torch.Tensor,
        "data loaders and samplers draw their seeds with this function, from the host's generator",
        random_=lambda self, *args, generator=None, **kwargs: random_(
            self, *args, generator=host_generator if generator is None else generator, **kwargs
        ),
    )


def _gloo(row: Callable[..., None]) -> None:
    """Make gloo run one thread per group, because its two threads write one string at the same time.

    ``c10d::ProcessGroupGloo::runLoop`` assigns the name of the last operation to this string without a lock.  A name of
    more than 15 characters needs heap memory, which is then freed twice; Megatron-FSDP's parameter gather has such a
    name, ``ALLGATHER_COALESCED`` (seen with torch 2.13.0 and AddressSanitizer).  One thread is enough, since a group's
    operations have the same order on all members.
    """
    init = dist.ProcessGroupGloo.__init__

    def with_one_thread(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        options: Any = None,
        *,
        timeout: timedelta | None = None,
        **rest: Any,
    ) -> None:
        """``rest``: further arguments of newer versions of torch, each of which is an attribute of the options."""
        if not isinstance(options, dist.ProcessGroupGloo._Options):
            timeout, options = options or timeout, dist.ProcessGroupGloo._Options()
            options._timeout = timeout or default_pg_timeout
            names = os.environ.get("GLOO_SOCKET_IFNAME", "")
            devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",") if name]
            options._devices = devices or [dist.ProcessGroupGloo.create_default_device()]
        options._threads = 1
        for name, value in rest.items():
            setattr(options, name, value)
        init(self, store, rank, size, options)

    row(
        dist.ProcessGroupGloo,
        "gloo's two threads write one string at the same time, and corrupt the heap with Megatron-FSDP: use one",
        __init__=with_one_thread,
    )


class _WorkWithEnd(dist.Work):
    """Asynchronous operation ``work`` that calls ``end`` once, before it reports to the caller that it is done."""

    def __init__(self, work: Any, end: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._end = work, functools.cache(end)

    def wait(self, *timeout: timedelta) -> bool:
        done = bool(self._work.wait(*timeout))
        self._end()
        return done

    def is_completed(self) -> bool:
        done = bool(self._work.is_completed())
        if done:
            self._end()
        return done


def _reductions(row: Callable[..., None]) -> None:
    """Replace reductions that gloo lacks (PREMUL_SUM), or that lose a NaN with gloo (MAX, MIN).

    PREMUL_SUM, which only NCCL has, is the sum of each rank's tensor times the rank's factor.  In MAX and MIN of
    floating-point numbers gloo keeps or loses a NaN, depending on the rank and the index in the tensor (torch 2.15).
    The replacement keeps a NaN, as ``torch.maximum`` does: it also reduces a second tensor that is 1 (MIN: -1) where
    the first tensor is NaN, else 0.
    """
    all_reduce, reduce_scatter, reduce_scatter_tensor = dist.all_reduce, dist.reduce_scatter, dist.reduce_scatter_tensor

    def is_premul(op: Any) -> bool:
        return bool(op == dist.ReduceOp.PREMUL_SUM)

    def is_extreme(op: Any) -> bool:
        return bool(op == dist.ReduceOp.MAX or op == dist.ReduceOp.MIN)

    def factor(op: Any) -> Any:
        """Return the factor of a PREMUL_SUM, a number or a tensor, which torch 2.10 exposes only through pickling."""
        return op.__getstate__()[1]

    def extreme(tensor: torch.Tensor, op: Any, *rest: Any, **named: Any) -> Any:
        own = tensor.detach()
        missing = own.isnan().to(own.dtype)
        both = torch.stack([own, missing if op == dist.ReduceOp.MAX else -missing])

        def write() -> None:
            own.copy_(both[0].masked_fill_(both[1] != 0, torch.nan))

        work = all_reduce(both, op, *rest, **named)
        if work is not None:
            return _WorkWithEnd(work, write)
        write()
        return None

    @functools.wraps(all_reduce)
    def scaled_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *rest: Any, **named: Any) -> Any:
        # A coalesced operation runs after this function returns, so it uses gloo's own MAX and MIN.
        if is_extreme(op) and tensor.is_floating_point() and not dist.distributed_c10d._world.pg_coalesce_state:
            return extreme(tensor, op, *rest, **named)
        if is_premul(op):
            with torch.no_grad():
                tensor.mul_(factor(op))
            op = dist.ReduceOp.SUM
        return all_reduce(tensor, op, *rest, **named)

    # A reduce-scatter must not change its input, so a scaled copy is reduced.
    @functools.wraps(reduce_scatter)
    def scaled_reduce_scatter(
        output: torch.Tensor, input_list: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, *rest: Any, **named: Any
    ) -> Any:
        if is_premul(op):
            input_list, op = [tensor.detach() * factor(op) for tensor in input_list], dist.ReduceOp.SUM
        return reduce_scatter(output, input_list, op, *rest, **named)

    @functools.wraps(reduce_scatter_tensor)
    def scaled_reduce_scatter_tensor(
        output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, *rest: Any, **named: Any
    ) -> Any:
        if is_premul(op):
            input, op = input.detach() * factor(op), dist.ReduceOp.SUM
        return reduce_scatter_tensor(output, input, op, *rest, **named)

    row(
        dist,
        "gloo has no PREMUL_SUM, with which Megatron-FSDP scales gradients in the sum: the replacement scales, then "
        "sums; gloo's MAX and MIN may lose a NaN: the replacement also reduces a tensor that marks each NaN",
        all_reduce=scaled_all_reduce,
        reduce_scatter=scaled_reduce_scatter,
        reduce_scatter_tensor=scaled_reduce_scatter_tensor,
    )
