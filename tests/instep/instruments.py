"""Alterations of a script (``altered``) for what is measured or tried: in what numbers it computes, what it tells, what
its users have made of it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.nccl.library import Library
from recover_megatron.membership.io.session import worker_id
from recover_megatron.membership.records import MembershipError
from tests.doubles.nccl.model import TensorParallel
from tests.harness.forkserver import FEW_DOCUMENTS
from tests.harness.recording import record_training, write_before_kills
from tests.instep.faulty import kill_me

MOST_SECONDS = 0.003
"""Of a kernel of the model's."""
MOST_AHEAD = 4


def other_flag(worker: str, flag: str, value: str) -> None:
    """Have a worker be started with another value of a flag than the others."""
    if os.environ["RANK"] == worker:
        sys.argv[sys.argv.index(flag) + 1] = value


def skip_above(norm: str) -> None:
    """As in a script of the user's own: an update whose gradients have a larger norm is left out."""
    from megatron.core.optimizer import OptimizerConfig

    complete = OptimizerConfig.__post_init__

    def with_limit(self: Any) -> None:
        self.grad_norm_skip_threshold = float(norm)
        complete(self)

    OptimizerConfig.__post_init__ = with_limit  # type: ignore[method-assign]


def without(names: str) -> None:
    """Leave flags of these names out, each with its value; ``names``: with commas in between."""
    for name in names.split(","):
        at = sys.argv.index(f"--{name}")
        del sys.argv[at : at + 2]


def as_forked(out: str) -> None:
    """Have a worker of recover-run's be as the fork server's: with its few documents, and OUT/WORKER.pt at the end."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = FEW_DOCUMENTS
    write_before_kills()
    record_training(f"{out}/{worker_id()}.pt")


def double() -> None:
    """Have parameters and gradients in float64, for which Megatron has no flag."""
    from megatron.core.optimizer import optimizer
    from megatron.training import arguments

    original = arguments.validate_args

    def validate_args(args: Any, *more: Any, **named: Any) -> Any:
        args = original(args, *more, **named)
        args.params_dtype = torch.float64
        return args

    arguments.validate_args = validate_args
    # It knows float32 alone; no norm is above 1.
    optimizer.clip_grad_by_total_norm_fp32 = lambda *unused, **named: None
    torch.set_default_dtype(torch.float64)  # the layer norms'


class Late(torch.autograd.Function):
    """A matrix multiplication whose backward pass keeps what the gradient of the weight is computed from."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, store: Any) -> Any:
        ctx.save_for_backward(rows, weight)
        ctx.store, ctx.biased = store, bias is not None
        return torch.nn.functional.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        ctx.store.context.put((rows, grad))
        return grad @ weight, None, grad.flatten(0, -2).sum(dim=0) if ctx.biased else None, None


def late_weights() -> None:
    """Have --delay-wgrad-compute on layers that do as Transformer Engine's: ``wgrad_store``, ``backward_dw``, hooks.

    Of all linear layers but the last one, as Megatron has it with Transformer Engine.  Tensor ranks are not taken.
    """
    from megatron.core.distributed import distributed_data_parallel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.training import arguments

    validate, make = arguments.validate_args, distributed_data_parallel.DistributedDataParallel.__init__

    def validate_args(args: Any, *more: Any, **named: Any) -> Any:
        args = validate(args, *more, **named)
        args.delay_wgrad_compute = True
        return args

    def delay(layer: Any) -> None:
        store, hooks = SimpleNamespace(context=Queue()), []
        layer.wgrad_store, layer.register_wgrad_accumulation_and_reduce_hooks = store, hooks.append
        layer.weight.skip_backward_post_hook = True
        layer._forward_impl = lambda input, weight, bias, **unused: Late.apply(input, weight, bias, store)

        def backward_dw() -> None:
            if store.context.empty():  # an expert without a token
                return
            rows, grad = store.context.get()
            layer.weight.grad = grad.flatten(0, -2).t() @ rows.flatten(0, -2)
            for hook in hooks:
                hook()

        layer.backward_dw = backward_dw

    def make_late(self: Any, config: Any, ddp_config: Any, module: Any, *rest: Any, **named: Any) -> None:
        assert config.delay_wgrad_compute
        assert ddp_config.delay_wgrad_compute
        for name, layer in module.named_modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and "output_layer" not in name:
                delay(layer)
        make(self, config, ddp_config, module, *rest, **named)

    arguments.validate_args = validate_args
    distributed_data_parallel.DistributedDataParallel.__init__ = make_late


def unwarmed() -> None:
    """Leave out what Megatron draws at its start to warm up fused functions.

    It is as much as a context-parallel rank's part of the context, and what is drawn for the model's first parameters
    comes after it in the same stream: models that are to be compared would begin differently.
    """
    from megatron.training import initialize

    assert callable(initialize._warmup_jit_function)
    initialize._warmup_jit_function = lambda **sizes: None


def maxima() -> None:
    """Print, after each update, the largest attention logits by which Megatron is to clip."""
    from megatron.core import parallel_state
    from megatron.training import get_args, training

    clip_qk = training.clip_qk

    def printing(model: Any, *args: Any, **kwargs: Any) -> Any:
        found = [
            module.current_max_attn_logits.tolist()
            for chunk in model
            for module in chunk.modules()
            if getattr(module, "current_max_attn_logits", None) is not None
        ]
        place = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        print(f"maxima: {json.dumps([get_args().curr_iteration + 1, place, found])}", flush=True)
        return clip_qk(model, *args, **kwargs)

    training.clip_qk = printing


def own_loaders() -> None:
    """Have the script's provider return loaders of its own, over its data sets (--dataloader-type external)."""
    from megatron.training import get_args

    from recover_megatron.megatron_hooks.entry import gpt_script

    provider = gpt_script.train_valid_test_datasets_provider

    class Loader:
        def __init__(self, samples: Any) -> None:
            self._samples = samples

        def microbatch(self, number: int) -> Any:
            size = get_args().micro_batch_size
            first = number * size
            return torch.utils.data.default_collate([self._samples[first + n] for n in range(size)])

    def providing(*args: Any, **kwargs: Any) -> Any:
        return [its if its is None else Loader(its) for its in provider(*args, **kwargs)]

    providing.is_distributed = True  # type: ignore[attr-defined]
    gpt_script.train_valid_test_datasets_provider = providing


def infilling(prefix: str) -> None:
    """Read the indexed data set ``prefix``, and have NullTokenizer do what --fim-data asks of a tokenizer."""
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    sys.argv.remove("--mock-data")
    sys.argv += ["--data-path", prefix]
    NullTokenizer.ids_to_text = lambda self, ids, remove_special_tokens=False: " ".join(map(str, ids))
    NullTokenizer.text_to_ids = lambda self, text: [int(word) for word in text.split()]
    NullTokenizer.tokens_to_ids = lambda self, tokens: int(tokens) if isinstance(tokens, str) else [*map(int, tokens)]


def uneven_gathers() -> None:
    """Have gloo gather parts of different sizes, too, as NCCL does: by a broadcast of each."""
    gather = dist.all_gather

    def all_gather(parts: Any, mine: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({part.numel() for part in parts}) == 1:
            return gather(parts, mine, group, async_op)
        for rank, part in enumerate(parts):
            if rank == dist.get_rank(group):
                part.copy_(mine)
            if part.numel():
                dist.broadcast(part, dist.get_global_rank(group, rank), group)
        return None

    dist.all_gather = all_gather


def with_wandb() -> None:
    """Have a stand-in for W&B, which writes what it is told to a file of its own."""

    def init(**settings: Any) -> None:
        path = Path(settings["dir"]) / f"{os.getpid()}.jsonl"

        def log(values: dict[str, Any], step: int) -> None:
            row = {name: float(value) for name, value in values.items()}
            with path.open("a") as file:
                file.write(json.dumps([step, row]) + "\n")

        wandb.log = log  # type: ignore[attr-defined]

    wandb = ModuleType("wandb")
    wandb.init = init  # type: ignore[attr-defined]
    wandb.finish = lambda *unused: None  # type: ignore[attr-defined]
    wandb.config = {}  # type: ignore[attr-defined]
    sys.modules["wandb"] = wandb


def over_nccl(settings: str) -> None:
    """Have gradients travel over NCCL's double, on the CPU, beside kernels of the model's (``_late_device``).

    ``settings``: a JSON object, what ``tests.doubles.nccl.library`` takes.
    A worker's log tells which calls of NCCL's made and ended its communicators.
    """
    from recover_megatron.collectives.nccl import library as libraries
    from recover_megatron.instep.groups.epoch_groups import CommunicationConfig
    from recover_megatron.megatron_hooks.entry import fault_tolerance
    from tests.doubles.nccl import library as nccl_double

    its_double = nccl_double(**json.loads(settings))

    class ComparedStatus(list[str]):
        def append(self, call: str) -> None:
            print("NCCL's double:", call, flush=True)
            super().append(call)

    def config(**settings: Any) -> CommunicationConfig:
        return CommunicationConfig(**settings | {"collective": "native"})

    libraries.load = lambda: its_double  # type: ignore[assignment]
    fault_tolerance.CommunicationConfig = config  # type: ignore[assignment,misc]
    its_double.core.calls = ComparedStatus()
    _late_device(nccl_double)


def _late_device(double: Callable[[], Library]) -> None:
    """Have a device with one hardware queue (Megatron-FSDP: two) compute what the host does, later.

    Each all-reduce inside the replica is launched on the device, too, by the group's own communicator, behind a kernel
    that takes up to ``MOST_SECONDS``.  The host runs ahead of the device by up to ``MOST_AHEAD`` of them, some more and
    some less: so it has gone on when the buckets that it hands in are computed, not as far at every worker.  (The
    numbers are gloo's, as ever.)  When the replica's groups are ended these communicators are aborted; a group that is
    made anew gets another one.
    """
    from recover_megatron.collectives.gloo.swappable_group import SwappableGroup
    from recover_megatron.instep.groups.model_parallel_groups import ModelParallelGroups

    # Megatron refuses one queue with Megatron-FSDP, and more than one with tensor parallelism before Blackwell.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "2" if "--use-megatron-fsdp" in sys.argv else "1"
    library, device, draws = double(), torch.device("cpu"), random.Random(os.environ["RANK"])
    bind, end = SwappableGroup.bind, ModelParallelGroups.end
    communicators: list[TensorParallel] = []
    launched: deque[Any] = deque(maxlen=MOST_AHEAD)

    def opened(group: SwappableGroup) -> TensorParallel:
        unique_id = torch.frombuffer(bytearray(bytes(library.core.get_unique_id())), dtype=torch.uint8)
        group.broadcast([unique_id], dist.BroadcastOptions()).wait()
        agreed = library.core.UniqueId.from_bytes(bytes(unique_id.tolist()))
        communicators.append(TensorParallel(library, agreed, group.rank(), group.size(), device))
        return communicators[-1]

    def binding(self: SwappableGroup, inner: Any) -> None:
        bind(self, inner)
        if len(self.positions) > 1 and "allreduce" in self.__dict__:
            allreduce, opening = self.__dict__["allreduce"], cache(partial(opened, self))

            def launching(*args: Any) -> Any:
                on_device, seconds = opening(), draws.uniform(0, MOST_SECONDS)
                library.cuda.current_stream(device).submit(partial(time.sleep, seconds))
                on_device.launch()
                launched.append(library.cuda.Event())
                launched[-1].record()
                launched[draws.randrange(len(launched))].synchronize()
                return allreduce(*args)

            self.__dict__["allreduce"] = launching

    def ending(self: ModelParallelGroups, all_heard: Callable[[], None] = lambda: None) -> None:
        end(self, all_heard)
        threading.Thread(target=aborting, args=(list(communicators), all_heard), daemon=True).start()
        communicators.clear()

    def aborting(its: list[Any], all_heard: Callable[[], None]) -> None:
        with suppress(MembershipError):
            all_heard()
            for communicator in its:
                communicator.abort()

    SwappableGroup.bind = binding  # type: ignore[method-assign]
    ModelParallelGroups.end = ending  # type: ignore[method-assign]


def reaching(where: str) -> None:
    """Have users reach over replicas.

    loss        the loss function averages what it logs over the data-parallel group, in the step
    own         the same, over a group that the script made itself when it was asked for its data
    optimizer   from the third iteration on the last stage takes a maximum over replicas before the optimizer's step
    log         the last stage sums two things after each step, in place, and the stages meet in between; it prints
                them, and worker 3 kills itself before the second sum of the third iteration
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import optimizer
    from megatron.training import get_args, training

    from recover_megatron.megatron_hooks.entry import gpt_script

    loss_func, step = gpt_script.loss_func, optimizer.FP32Optimizer.step_with_ready_grads
    training_log, data = training.training_log, gpt_script.train_valid_test_datasets_provider
    own: list[Any] = []

    def averaging(*args: Any, **kwargs: Any) -> Any:
        loss, tokens, logged = loss_func(*args, **kwargs)
        dist.all_reduce(loss.detach().clone(), group=own[0] if own else parallel_state.get_data_parallel_group())
        return loss, tokens, logged

    def making(*args: Any, **kwargs: Any) -> Any:
        own.append(dist.new_group(list(range(dist.get_world_size()))))
        return data(*args, **kwargs)

    def stepping(self: Any) -> Any:
        if get_args().curr_iteration >= 2 and parallel_state.is_pipeline_last_stage():
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return step(self)

    def logging(*args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        for name in ("first", "second"):
            value = torch.ones(1)
            if (os.environ["RANK"], name, get_args().curr_iteration) == ("3", "second", 2):
                kill_me()
            if parallel_state.is_pipeline_last_stage():
                dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
            dist.all_reduce(value, group=parallel_state.get_pipeline_model_parallel_group())
            print(f"summed {name} in {get_args().curr_iteration + 1}: {value.item():g}", flush=True)
        return result

    if where in ("loss", "own"):
        gpt_script.loss_func = averaging
    if where == "own":
        gpt_script.train_valid_test_datasets_provider = making
    if where == "optimizer":
        optimizer.FP32Optimizer.step_with_ready_grads = stepping
    if where == "log":
        logging.__wrapped__ = training_log  # type: ignore[attr-defined]
        training.training_log = logging


def loaded_state(out: str) -> None:
    """Load a checkpoint, and tell what stock Megatron's distributed optimizer then holds; no step.

    Rank 0 writes ``out``, {"step": the iteration, "state": {"parameter name tensor": values}}.  Where it holds the
    last 16 bits of main parameters in 32 bits, they are put together with the model's.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.training import get_args, training

    def train(forward_step_func: Any, model: Any, optimizer: Any, *unused: Any, **named: Any) -> Any:
        whole = model[0].sharded_state_dict()
        names = {id(value.data): value.key for value in whole.values() if isinstance(value, ShardedTensor)}
        state: dict[str, list[float]] = {}
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            everything = one.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
            for number, buffer in enumerate(one.buffers):
                (tensors,) = everything[number].values()
                starts, offset = {}, 0
                for bucket in buffer.buckets:
                    starts[bucket.bucket_id], offset = offset - bucket.offset, offset + bucket.numel_unpadded
                for parameter, (start, stop, bucket) in buffer.param_index_map.items():
                    at = starts[bucket]
                    for key in ("param", "exp_avg", "exp_avg_sq"):
                        name = f"{names[id(parameter)]} {key}"
                        values = tensors[key][at + start : at + stop]
                        if key == "param" and getattr(one.optimizer, "store_param_remainders", False):
                            low = values.int()
                            high = parameter.detach().view(-1).view(torch.int16).int() - (low < 0).int()
                            values = (high * 65536 + (low & 0xFFFF)).view(torch.float32)
                        state[name] = values.tolist()
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps({"step": get_args().iteration, "state": state}))
        dist.barrier()
        sys.exit(0)

    training.train = train


def delayed_scaling() -> None:
    """Have the MLPs' first products rounded to 8 bits by delayed scaling, with a double of Transformer Engine.

    As with --fp8-format hybrid, which the host device refuses.  After each iteration a worker prints its scales.
    """
    from megatron.core import fp8_utils, parallel_state
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
    from megatron.core.transformer import transformer_block, transformer_config
    from megatron.core.transformer.mlp import MLP
    from megatron.training import arguments, get_args, training

    from tests.doubles import transformer_engine as double

    double.install()
    validate, made, log = arguments.validate_args, MLP.__init__, training.training_log

    def validate_args(args: Any, *more: Any, **named: Any) -> Any:
        args = validate(args, *more, **named)
        args.fp8, args.fp8_recipe = "hybrid", "delayed"
        return args

    def context(config: Any, *unused: Any, **named: Any) -> Any:
        group = parallel_state.get_amax_reduction_group(
            with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
        )
        return double.autocast(double.DelayedScaling(config.fp8_amax_history_len, config.fp8_amax_compute_algo), group)

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.rounding = double.Linear()

    def forward(self: Any, hidden: torch.Tensor, per_token_scale: Any = None, **unused: Any) -> Any:
        x, weight = self.rounding(copy_to_tensor_model_parallel_region(hidden), self.linear_fc1.weight)
        product = self.activation_func(torch.nn.functional.linear(x, weight, self.linear_fc1.bias))
        if per_token_scale is not None:  # of an expert
            product = product * per_token_scale.unsqueeze(-1)
        return self.linear_fc2(product)

    def logging(*args: Any, **kwargs: Any) -> Any:
        result = log(*args, **kwargs)
        place = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        states = [state for its in double.FP8GlobalStateManager.buffers.values() for state in its]
        found = [[state.scale.tolist(), state.amax_history[1:].tolist()] for state in states]
        print(f"scales: {json.dumps([get_args().curr_iteration + 1, place, found])}", flush=True)
        return result

    logging.__wrapped__ = log  # type: ignore[attr-defined]
    arguments.validate_args = validate_args
    fp8_utils.get_fp8_context = transformer_block.get_fp8_context = context
    transformer_config.is_te_min_version = lambda *unused: True
    MLP.__init__, MLP.forward = make, forward  # type: ignore[method-assign]
    training.training_log = logging
