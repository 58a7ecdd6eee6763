"""What is refused before any process group is made: all reasons at once, each with its remedy.

Megatron checks flags too, by assertions deep inside: one at a time, as tracebacks, on every worker.  ``parse`` turns
those into the same kind of message.  The checks here are those whose failure would come late (missing data), unclear
(world size) or not at all (what --recover cannot keep exact).
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from recover_megatron import arguments, hostdevice
from recover_megatron.arguments import RecoverConfig, add_recover_arguments
from recover_megatron.chaos.spec import parse_spec
from recover_megatron.errors import UserError
from recover_megatron.megatron_hooks.layout import lanes_of

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


# ---- parsing -----------------------------------------------------------------------------------------------------


def arguments_provider(config: RecoverConfig, others: Sequence[Provider] = ()) -> Provider:
    """An ``extra_args_provider`` for Megatron's parser: our group, the given others, and errors told in one line.

    It also changes defaults of Megatron's where they could not run: on the host device the fused kernels, and with
    --recover the rerun machine, which replays whole steps.  A flag that the user gives wins; it is refused if it can't.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_recover_arguments(parser)
        for other in others:
            parser = other(parser)
        if hostdevice.is_active():
            _make_defaults(parser, hostdevice.host_defaults())
        if config.enabled:
            parser.set_defaults(rerun_mode="disabled")

        def error(message: str) -> NoReturn:
            # argparse would print all of Megatron's thousand lines of usage first.
            raise UserError(_with_suggestions(message, parser))

        if "--help" in sys.argv or "-h" in sys.argv:
            _mend_help(parser)
        parser.error = error  # type: ignore[method-assign]
        if os.environ.get("RANK", "0") != "0":
            parser.print_help = lambda file=None: None  # type: ignore[method-assign]  # one --help a run is enough
        return parser

    return provide


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape the texts that argparse cannot expand: one bare "%" in Megatron's help ends --help with a traceback."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


def _make_defaults(parser: argparse.ArgumentParser, flags: list[str]) -> None:
    """Let the parser start from these flags, as if every command line began with them."""
    given = parser.parse_args(flags)
    names = [parser._option_string_actions[word.split("=")[0]].dest for word in flags if word.startswith("--")]
    parser.set_defaults(**{name: getattr(given, name) for name in names})


def _with_suggestions(message: str, parser: argparse.ArgumentParser) -> str:
    """argparse's message, and for a flag that does not exist the ones that look like it."""
    prefix = "unrecognized arguments: "
    if not message.startswith(prefix):
        return f"{message} (all flags: --help)"
    known = list(parser._option_string_actions)
    parts = []
    for word in message.removeprefix(prefix).split():
        near = difflib.get_close_matches(word.split("=")[0], known, n=3) if word.startswith("--") else []
        parts.append(f"unknown flag {word}" + (f" (did you mean {' or '.join(near)}?)" if near else ""))
    return "; ".join(parts) + " (all flags: --help)"


def in_plain_words(call: Callable[[], Any]) -> Any:
    """Run a part of Megatron that checks flags; its assertions and complaints become UserErrors.

    Set RECOVER_TRACEBACK=1 to see the original traceback instead.
    """
    try:
        return call()
    except (AssertionError, ValueError, RuntimeError, KeyError, ImportError, FileNotFoundError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "megatron" not in Path(last.filename).parts or os.environ.get("RECOVER_TRACEBACK") == "1":
            raise  # a bug of ours, or asked for
        raise UserError(_refusal(error, last)) from None


def _refusal(error: Exception, last: traceback.FrameSummary) -> str:
    """One line of Megatron's refusal: its own words, or the check it made where it has none."""
    where = f"{Path(*Path(last.filename).parts[-3:])}:{last.lineno}"
    words = " ".join(str(error).split()) or f"this must hold: {(last.line or '').removeprefix('assert').strip()}"
    return f"Megatron refuses these flags: {words} ({where}; RECOVER_TRACEBACK=1 shows the traceback)"


# ---- our own checks ----------------------------------------------------------------------------------------------


def problems(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """Every reason why a run with these (parsed, not yet validated) flags cannot start; empty: none seen."""
    found = [*_layout(args), *_data(args), *_device(args), *_packages(args)]
    if config.enabled:
        found += [*arguments.problems(config), *_injection(args, config), *_too_few_replicas(args, config)]
        found += [*_cannot_recover(args), *_cannot_shard(args, config), *_log_dir(config.log_dir)]
    elif config.inject is not None:
        found.append("--recover-inject needs --recover: without it nothing is injected, and no death is survived")
    return found


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    return {
        "--tensor-model-parallel-size": getattr(args, "tensor_model_parallel_size", 1),
        "--pipeline-model-parallel-size": getattr(args, "pipeline_model_parallel_size", 1),
        "--context-parallel-size": getattr(args, "context_parallel_size", 1),
    }


def _too_few_replicas(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """A run that would end at its first death, or before, since it never has as many replicas as it must keep."""
    world, one = int(os.environ.get("WORLD_SIZE", "1")), math.prod(_sizes(args).values())
    if one < 1:
        return []  # Megatron says which size is wrong
    replica = one * lanes_of(args)
    if config.min_replicas <= max(1, world // replica):
        return []
    return [
        f"--recover-min-replicas {config.min_replicas}: this run has {world // replica} at its launch "
        f"({world} workers, {replica} to a replica) and never more: lower it, or start more workers"
    ]


def _layout(args: argparse.Namespace) -> list[str]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = _sizes(args)
    replica = math.prod(sizes.values())
    if replica < 1:
        return []  # Megatron says which size is wrong
    if world % replica == 0:
        return _batch(args, world // replica)
    product = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    return [
        f"{world} workers cannot hold whole replicas of {replica} ({product}): start a multiple of {replica} workers "
        f"(recover-run --nproc-per-node, --nnodes) or change these sizes"
    ]


def _batch(args: argparse.Namespace, ranks: int) -> list[str]:
    """A global batch that is no whole number of microbatches for every data-parallel rank."""
    micro, whole = getattr(args, "micro_batch_size", None), getattr(args, "global_batch_size", None)
    scheduled = getattr(args, "rampup_batch_size", None) or getattr(args, "step_batch_size_schedule", None)
    if not micro or not whole or scheduled or getattr(args, "decrease_batch_size_if_needed", False):
        return []
    if whole % (micro * ranks) == 0:
        return []
    return [
        f"global batch size {whole} is not a multiple of micro batch size {micro} x {ranks} data-parallel ranks: "
        "change --global-batch-size, --micro-batch-size or the number of workers"
    ]


def _data(args: argparse.Namespace) -> list[str]:
    """Data and tokenizer files that are not there (Megatron finds out after start-up, on some workers only)."""
    found = []
    sources = ("data_path", "data_args_path", "train_data_path", "per_split_data_args_path", "sft", "perform_rl_step")
    external = getattr(args, "dataloader_type", None) == "external"
    if (
        not getattr(args, "mock_data", False)
        and not external
        and not any(getattr(args, name, None) for name in sources)
    ):
        found.append(
            "no training data: give --data-path PREFIX (files PREFIX.bin and PREFIX.idx, made by "
            "scripts/prepare_corpus.py or Megatron's tools/preprocess_data.py), or --mock-data"
        )
    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in _prefixes(getattr(args, flag, None) or []):
            missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
            if missing and not (getattr(args, "sft", False) and Path(prefix).exists()):
                files = " and ".join(prefix + suffix for suffix in missing)
                found.append(
                    f"--{flag.replace('_', '-')} {prefix}: no {files} here (give the path without .bin or .idx; "
                    "scripts/prepare_corpus.py makes both from text)"
                )
    for flag in ("data_args_path", "per_split_data_args_path", "vocab_file", "merge_file"):
        path = getattr(args, flag, None)
        if path and "://" not in path and not Path(path).is_file():
            found.append(f"--{flag.replace('_', '-')} {path}: no such file")
    return found


EMERGING = ("muon", "dist_muon", "adaptive_muon", "soap", "lion")
"""Megatron's optimizers that are in the package emerging-optimizers."""


def _packages(args: argparse.Namespace) -> list[str]:
    """Python packages that a flag needs and that are not here; Megatron imports them when the run has begun."""
    # package: (module, argument, its values that need it; none: any)
    wanted: dict[str, tuple[str, str, tuple[str, ...]]] = {
        "emerging-optimizers": ("emerging_optimizers", "optimizer", EMERGING),
        "wandb": ("wandb", "wandb_project", ()),
        "sentencepiece": ("sentencepiece", "tokenizer_type", ("SentencePieceTokenizer", "Llama2Tokenizer")),
        "transformers": ("transformers", "tokenizer_type", ("HuggingFaceTokenizer",)),
        "tiktoken": ("tiktoken", "tokenizer_type", ("TikTokenizer",)),
    }
    return [
        f"--{name.replace('_', '-')} {value} needs the Python package {package}, which is not installed for "
        f"{sys.executable}: pip install {package}"
        for package, (module, name, values) in wanted.items()
        if (value := getattr(args, name, None)) and (not values or value in values) and not _installed(module)
    ]


def _installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _prefixes(blend: Sequence[str]) -> list[str]:
    """The dataset prefixes of a blend (PREFIX ... or WEIGHT PREFIX ...); remote ones are left to Megatron."""
    return [word for word in map(str, blend) if not _is_number(word) and "://" not in word]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _device(args: argparse.Namespace) -> list[str]:
    if hostdevice.is_active():
        return hostdevice.unsupported(args)
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    here = torch.cuda.device_count()
    if local > here:
        return [f"{local} workers on this machine, but {here} CUDA devices: lower --nproc-per-node to {here}"]
    return []


def _injection(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """A fault specification that cannot be read, or names workers that there are none of."""
    if config.inject is None:
        return []
    try:
        faults = parse_spec(config.inject)
    except ValueError as error:
        return [f"--recover-inject: {error}"]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return [
        f"--recover-inject {fault}: there is no worker {fault.worker} in a run of {world}"
        for fault in faults
        if fault.worker >= world
    ]


def _log_dir(folder: Path | None) -> list[str]:
    """A folder for steps.jsonl that cannot be made or written, found before the first iteration has been trained."""
    if folder is None:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return [f"--recover-log-dir {folder}: {error.strerror}; choose a folder that can be written"]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"--recover-log-dir {folder} cannot be written: choose another folder, or change its permissions"]
    return []


REFUSED = {
    "use_layer_wise_distributed_optimizer": (
        "the layer-wise distributed optimizer", "each worker would hold state that nobody else has"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "its groups can't be changed"),
    "use_megatron_fsdp": ("--use-megatron-fsdp", "its groups can't be changed"),
    "ddp_average_in_collective": ("--ddp-average-in-collective", "an average would depend on who is alive"),
    "inprocess_restart": (
        "--inprocess-restart", "when a worker dies it ends the step on all others and calls pretrain() again; "
        "--recover finishes the step"),
    "enable_ft_package": (
        "--enable-ft-package", "its ft_launcher restarts all workers when one dies; recover-run keeps them running, "
        "and --recover-hang-timeout finds one that hangs"),
    "hybrid_context_parallel": ("--hybrid-context-parallel", "its microbatches differ in size"),
    "perform_rl_step": ("--perform-rl-step", "its microbatches are not known by their numbers"),
    "fim_data": ("--fim-data", "its samples depend on who read which before"),
    "full_validation": ("--full-validation", "its evaluation steps depend on the number of replicas"),
    "iterations_to_skip": ("--iterations-to-skip", "skipped samples are read past the hooks"),
    "decrease_batch_size_if_needed": ("--decrease-batch-size-if-needed", "the batch must not depend on who is alive"),
    "te_rng_tracker": ("--te-rng-tracker", "its random states can't be set per microbatch"),
    "qk_clip": ("--qk-clip", "it takes a maximum over all replicas in the step"),
    "log_max_attention_logit": ("--log-max-attention-logit", "it takes a maximum over all replicas in the step"),
    "moe_router_enable_expert_bias": ("--moe-router-enable-expert-bias", "it sums over all replicas in the step"),
    "overlap_moe_expert_parallel_comm": ("--overlap-moe-expert-parallel-comm", "its schedule was not examined"),
    "log_straggler": ("--log-straggler", "it reports to a rank that it chooses at the start"),
    "delay_wgrad_compute": ("--delay-wgrad-compute", "gradients would come after the sum"),
    "check_weight_hash_across_dp_replicas_interval": (
        "--check-weight-hash-across-dp-replicas-interval", "it expects all replicas of the launch"),
    "ckpt_assume_constant_structure": (
        "--ckpt-assume-constant-structure", "who writes what changes when workers are lost"),
}  # fmt: skip
"""Attribute of Megatron's arguments -> (flag, why it is refused with --recover)."""

REFUSED_SHARDED = {
    "fp16": ("--fp16", "its loss scale would be found from one worker's part of the gradients"),
    "use_precision_aware_optimizer": (
        "--use-precision-aware-optimizer", "the inner optimizer holds the main parameters"),
    "optimizer_cpu_offload": ("--optimizer-cpu-offload", "its state moves between devices by itself"),
    "fp8_param_gather": ("--fp8-param-gather", "its parameters are not views of the buffer that is gathered"),
    "fp8_param": ("--fp8-param-gather", "its parameters are not views of the buffer that is gathered"),
    "fp4_param": ("--fp4-param-gather", "its parameters are not views of the buffer that is gathered"),
    "reuse_grad_buf_for_mxfp8_param_ag": ("--reuse-grad-buf-for-mxfp8-param-ag", "gradients must outlive the update"),
    "overlap_param_gather_with_optimizer_step": (
        "--overlap-param-gather-with-optimizer-step", "the update is one step, all or nothing"),
    "reduce_scatter_with_fp32_accumulation": (
        "--reduce-scatter-with-fp32-accumulation", "the ring sums in the gradients' type: "
        "use --accumulate-allreduce-grads-in-fp32"),
    "log_params_norm": ("--log-params-norm", "it expects Megatron's own shards"),
    "mtp_num_layers": ("--mtp-num-layers", "its gradients have a norm of their own"),
}  # fmt: skip
"""The same for what is refused with --recover and --use-distributed-optimizer together."""


def _cannot_shard(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    if not getattr(args, "use_distributed_optimizer", False):
        return []
    if (optimizer := getattr(args, "optimizer", None)) in EMERGING:
        return [f"--recover with --use-distributed-optimizer cannot be combined with --optimizer {optimizer} yet: "
                "its shards are whole layers"]  # fmt: skip
    if (
        config.shadow_device == "cpu"
        and not hostdevice.is_active()
        and any(importlib.util.find_spec(name) for name in ("apex", "transformer_engine"))
    ):
        return ["--recover-shadow-device cpu needs torch's Adam: apex and Transformer Engine update on the GPU alone"]
    refused = {
        flag: why for name, (flag, why) in REFUSED_SHARDED.items() if getattr(args, name, None)
    }  # two names of one flag are one
    return [
        f"--recover with --use-distributed-optimizer cannot be combined with {flag} yet: {why}"
        for flag, why in refused.items()
    ]


def _cannot_recover(args: argparse.Namespace) -> list[str]:
    """What --recover refuses for now: where it could not keep every microbatch counted once, or has not been tried."""
    found = [
        f"--recover cannot be combined with {flag} yet: {why}"
        for name, (flag, why) in REFUSED.items()
        if getattr(args, name, None)
    ]
    if getattr(args, "skip_train", False) or getattr(args, "train_iters", None) == 0:
        found.append("--recover has nothing to keep in a run that trains nothing (--skip-train, --train-iters 0): "
                     "start it without --recover")  # fmt: skip
    if getattr(args, "optimizer", None) == "dist_muon":
        found.append("--recover cannot be combined with --optimizer dist_muon yet: each worker would hold optimizer "
                     "state that nobody else has")  # fmt: skip
    for name, size in (
        ("tensor_parallel_num_weight_shards", "tensor_model_parallel_size"),
        ("expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"),
    ):
        shards = getattr(args, name, None)
        if shards is not None and shards > (getattr(args, size, None) or args.tensor_model_parallel_size):
            found.append(
                f"--recover cannot be combined with --{name.replace('_', '-')} {shards} yet: "
                "weights would be spread over replicas, and gathered in the step"
            )
    graphs = getattr(args, "cuda_graph_impl", None)
    if graphs not in (None, "none") or getattr(args, "enable_cuda_graph", False):
        found.append("--recover cannot be combined with CUDA graphs yet: leave --cuda-graph-impl at none")
    loader = getattr(args, "dataloader_type", None)
    if loader not in (None, "single"):
        found.append(
            f"--recover needs --dataloader-type single (microbatch ids are defined by its order), not {loader}"
        )
    if getattr(args, "fp16", False) and not getattr(args, "accumulate_allreduce_grads_in_fp32", False):
        found.append(
            "--recover with --fp16 needs --accumulate-allreduce-grads-in-fp32: added up in fp16, gradients overflow by "
            "how many of them one replica adds, so after a death other iterations would be skipped than without it"
        )
    if getattr(args, "rerun_mode", "disabled") != "disabled":
        found.append("--recover needs --rerun-mode disabled: a re-run of a step would count its microbatches twice")
    balancing = getattr(args, "moe_router_load_balancing_type", None) or ()
    for kind in {balancing} if isinstance(balancing, str) else set(balancing):
        if kind in ("global_aux_loss", "quantile_balancing"):
            found.append(f"--recover cannot be combined with --moe-router-load-balancing-type {kind} yet: "
                         "it sums over all replicas in the step")  # fmt: skip
    delayed = getattr(args, "fp8", None) and getattr(args, "fp8_recipe", "delayed") == "delayed"
    if delayed and not getattr(args, "tp_only_amax_red", False):
        found.append("--recover with delayed FP8 scaling needs --tp-only-amax-red: amax must stay in the replica")
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        found.append("--recover cannot be combined with --non-persistent-ckpt-type local yet: its groups are fixed")
    group = getattr(args, "microbatch_group_size_per_vp_stage", None)
    if group not in (None, getattr(args, "pipeline_model_parallel_size", 1)):
        found.append(
            "--recover needs --microbatch-group-size-per-virtual-pipeline-stage at its default, the pipeline size"
        )
    return found
