"""What the entry script refuses, does in another way and says, what it touches of Megatron, what an exit means."""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import inspect
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from megatron.core import utils as core_utils
from megatron.training import arguments, global_vars, training
from megatron.training.arguments import add_megatron_arguments
from megatron.training.utils import common_utils
from packaging.version import Version
from torch.distributed.checkpoint.metadata import TensorProperties

from recover_megatron import hostdevice
from recover_megatron.arguments import RecoverConfig
from recover_megatron.collectives import torch_nccl
from recover_megatron.collectives.nccl import library
from recover_megatron.errors import UserError, refuse
from recover_megatron.integrate import Loop, Seam
from recover_megatron.megatron_hooks import monkeypatch as patches
from recover_megatron.megatron_hooks.entry import fault_tolerance, flags, program, refused
from recover_megatron.megatron_hooks.entry import flags as flag_checks
from recover_megatron.megatron_hooks.entry.endings import HANDLERS, EndedEarly
from recover_megatron.megatron_hooks.entry.fault_tolerance import FaultTolerance
from recover_megatron.megatron_hooks.entry.flags import arguments_provider
from recover_megatron.megatron_hooks.entry.program import with_checkpoint_args
from recover_megatron.megatron_hooks.entry.refused import cannot_recover, cannot_shard
from recover_megatron.megatron_hooks.layout import batches_to_come
from recover_megatron.megatron_hooks.loop.megatron_lm import MEGATRON_LM
from recover_megatron.megatron_hooks.loop.training import _check_batches
from recover_megatron.membership.records import EXIT_NO_REPLICA, CoordinatorLost
from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer
from tests.harness.processes import python
from tests.megatron_hooks.tiny import MOCK, MODEL, OURS, SCHEDULE

GOOD = [*MODEL, *SCHEDULE, *MOCK]
MONKEYPATCH = {
    "megatron.core.dist_checkpointing.strategies.async_utils.PersistentAsyncCaller": (
        "close is_current_async_call_done schedule_async_call"
    ),
    "megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync": (
        "get_save_function_and_args retrieve_write_results"
    ),
    "megatron.core.dist_checkpointing.strategies.filesystem_async": "get_write_results_queue",
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": "_make_backward_post_hook",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup": (
        "finish_grad_sync finish_param_sync start_grad_sync start_param_sync"
    ),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": "__init__",
    "megatron.core.optimizer.optimizer_config.AdamOptimizerConfig": "__post_init__",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig": "__post_init__",
    "megatron.core.optimizer.optimizer_config.SGDOptimizerConfig": "__post_init__",
    "megatron.core.parallel_state": "create_group",
    "megatron.core.pipeline_parallel.schedules": "backward_step forward_step_calc_loss",
    "megatron.core.transformer.moe.router": "apply_biased_logits",
    "megatron.core.transformer.moe.router_trace.RouterTracer": "__init__",
    "megatron.training.argument_utils.ArgumentGroupFactory": "_get_field_docstrings",
    "megatron.training.checkpointing": (
        "append_to_progress_log check_checkpoint_args get_checkpoint_name get_checkpoint_tracker_filename "
        "get_rng_state schedule_async_save"
    ),
    "megatron.training.datasets.fim_dataset.GPTFIMDataset": "_query_document_sample_shuffle_indices",
    "megatron.training.initialize": "_initialize_distributed",
    "megatron.training.training": (
        "append_to_progress_log build_pretraining_data_loader build_train_valid_test_data_loaders "
        "calc_params_l2_norm check_param_hashes_across_dp_replicas "
        "compute_throughputs_and_append_to_progress_log consume_seqlen_stats_in_iteration "
        "cyclic_iter dummy_train_step evaluate evaluate_and_print_results get_forward_backward_func "
        "load_checkpoint maybe_finalize_async_save save_checkpoint train train_step training_log"
    ),
    "megatron.training.utils.log_utils": "safe_get_world_size",
    "megatron.training.wandb_utils": "on_save_checkpoint_success",
}
"""What is wrapped with --recover: module, or class -> functions."""


def refusal(forkserver: ForkServer, out: Path, argv: list[str], workers: int = 1) -> str:
    """What the node's first worker says; asserts that every worker refused, and that the others said nothing."""
    run = forkserver.run(workers, [OURS, *argv], out, timeout=60, together=False)
    assert run.codes == [2] * workers, run.tail()
    for other in run.logs[1:]:
        assert other.read_text() == ""
    said = run.logs[0].read_text()
    assert "Traceback" not in said
    return said


@pytest.mark.slow
def test_a_world_that_cannot_hold_whole_replicas_is_refused_once_with_the_remedy(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    said = refusal(forkserver, tmp_path, [*GOOD, "--tensor-model-parallel-size", "2"], workers=3)
    assert said == (
        "pretrain_gpt_recover.py: error: 3 workers are not a multiple of the replica size 2 (--tensor-model-parallel-"
        "size 2): start a multiple of 2 (recover-run --nproc-per-node, --nnodes) or change these sizes\n"
    )


def test_megatron_is_imported_without_collections_of_garbage_even_if_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collects = []

    def imports(config: RecoverConfig) -> NoReturn:
        collects.append(gc.isenabled())
        raise UserError("missing")

    monkeypatch.setattr(program, "choose_device", imports)
    monkeypatch.setattr(program, "_in_charge", False)
    with pytest.raises(UserError, match="missing"):
        program.load(RecoverConfig())
    assert (collects, gc.isenabled()) == ([False], True)


def test_megatron_reads_the_help_of_its_flags_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, factory = [], arguments.ArgumentGroupFactory
    read = factory._get_field_docstrings

    def counted(self: object, src_cfg_class: type) -> dict[str, str]:
        reads.append(src_cfg_class)
        return read(self, src_cfg_class)

    def helps() -> list[str | None]:
        return [action.help for action in add_megatron_arguments(argparse.ArgumentParser())._actions]

    stock = helps()
    monkeypatch.setattr(factory, "_get_field_docstrings", counted)
    patches.wrap("ArgumentGroupFactory._get_field_docstrings", program._read_once)
    assert helps() == helps() == stock
    assert len(reads) == len(set(reads)) > 1


def test_an_unknown_flag_is_named_with_the_one_that_was_meant(forkserver: ForkServer, tmp_path: Path) -> None:
    said = refusal(forkserver, tmp_path, [*GOOD, "--tensor-parallel-sise", "2"])
    assert "unknown flag --tensor-parallel-sise" in said
    assert len(said.splitlines()) == 1
    assert "--recover-log-dir" in refusal(forkserver, tmp_path, [*GOOD, "--recover-logdir", "x"])


NO_DATA = [*MODEL, *SCHEDULE]
BAD = [
    (NO_DATA, "", "no training data: give --data-path PREFIX"),
    (NO_DATA, "--data-path /nowhere/corpus", "no /nowhere/corpus.bin and /nowhere/corpus.idx here"),
    (NO_DATA, "--data-path 0.3 /nowhere/a 0.7 /nowhere/b", "--data-path /nowhere/b: no"),
    (GOOD, "--vocab-file /nowhere/vocab.json", "--vocab-file /nowhere/vocab.json: no such file"),
    (GOOD, "--recover-device tpu", "argument --recover-device: invalid choice: 'tpu'"),
    (GOOD, "--global-batch-size 15", "global batch size 15 is not a multiple of micro batch size 2 x 1"),
    (GOOD, "--num-layers four", "argument --num-layers: invalid int value: 'four'"),
    (GOOD, "--hidden-size 33", "Megatron refuses these flags"),
    (GOOD, "--recover --recover-log-dir /proc/nowhere", "--recover-log-dir /proc/nowhere: "),
    (GOOD, "--eval-interval 0", "give --eval-interval N with N > 0 (and --eval-iters 0 for no evaluation"),
    (GOOD, "--save /proc/nowhere --save-interval 1", "--save /proc/nowhere: "),
    (GOOD, "--recover --recover-min-replicas 0", "--recover-min-replicas 0: give 1 or more"),
    (GOOD, "--wandb-project mine", "--wandb-project mine needs the Python package wandb, which is not"),
    (GOOD, "--tokenizer-type TikTokenizer", "--tokenizer-type TikTokenizer needs the Python package tiktoken"),
    (GOOD, "--recover --recover-collective native",
     "--recover-collective native needs GPUs, since it uses NCCL's collectives: on the CPU use ring"),
    (GOOD, "--recover --skip-train", "--recover has nothing to protect in a run that trains nothing"),
    (GOOD, "--recover --train-iters 0", "--recover has nothing to protect in a run that trains nothing"),
    (GOOD, "--recover --recover-min-replicas 5", "--recover-min-replicas 5: this run starts with 1 replicas"),
    (GOOD, "--recover-inject 0@3:backward", "--recover-inject needs --recover: without it no fault is inj"),
    (GOOD, "--recover --recover-grace 5 --use-distributed-optimizer --recover-shadow-shards 0",
     "--recover-grace with --use-distributed-optimizer needs --recover-shadow-shards 1 or 2"),
    (GOOD, "--recover --bf16 --qk-clip --use-distributed-optimizer",
     "--recover with --use-distributed-optimizer cannot be combined with --qk-clip yet: clipping scales complete"),
    (GOOD, "--recover --tensor-parallel-num-weight-shards 2",
     "--recover cannot be combined with --tensor-parallel-num-weight-shards 2 yet: weights are then spread"),
    (GOOD, "--recover --expert-tensor-parallel-num-weight-shards 2",
     "--recover cannot be combined with --expert-tensor-parallel-num-weight-shards 2 yet: weights are"),
    (GOOD, "--recover --fp8-format hybrid",
     "--recover accepts delayed FP8 scaling (--fp8-recipe delayed, Megatron's default) only with --recover-untested: "),
    (GOOD, "--recover --recover-untested --fp8-format hybrid --use-transformer-engine-op-fuser",
     "--recover cannot be combined with --use-transformer-engine-op-fuser and --fp8-recipe delayed yet: fused layers"),
    (GOOD, "--recover --recover-untested --fp8-format hybrid --overlap-moe-expert-parallel-comm",
     "--recover cannot be combined with --overlap-moe-expert-parallel-comm and --fp8-recipe delayed yet: forward"),
    (GOOD, "--recover --use-megatron-fsdp --num-distributed-optimizer-instances 2",
     "--use-megatron-fsdp with --num-distributed-optimizer-instances 2 needs --overlap-grad-reduce: without it"),
    (GOOD, "--recover --rerun-mode report_stats",
     "--recover cannot be combined with --rerun-mode report_stats: Megatron up to 0.20 does not start in this mode"),
    (GOOD, "--recover --te-rng-tracker", "--recover accepts --te-rng-tracker only with --recover-untested: "),
    (GOOD, "--recover --inprocess-restart", "--recover cannot be combined with --inprocess-restart yet: after a death"),
    (GOOD, "--recover --enable-ft-package", "--recover cannot be combined with --enable-ft-package yet: its"),
    (GOOD, "--recover --phase-transition-iterations 4",
     "--recover cannot be combined with --phase-transition-iterations yet: Megatron"),
    (GOOD, "--transformer-impl transformer_engine", "needs TransformerEngine's GPU kernels"),
    (GOOD, "--context-parallel-size 1 --data-path '/no where/a'", "no /no where/a.bin"),
]  # fmt: skip
"""Flags, what comes after them, and what is said."""


@pytest.mark.parametrize(("base", "flags", "reason"), BAD)
def test_bad_input_is_one_clear_message(
    forkserver: ForkServer, tmp_path: Path, base: list[str], flags: str, reason: str
) -> None:
    assert reason in refusal(forkserver, tmp_path, [*base, *shlex.split(flags)])


def test_without_recover_instances_that_megatron_would_never_sum_are_warned_of_once(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    apart = ["--use-megatron-fsdp", "--num-distributed-optimizer-instances", "2"]
    said = refusal(forkserver, tmp_path, [*GOOD, *apart, "--global-batch-size", "16", "--hidden-size", "33"], workers=2)
    assert said.count("warning: --use-megatron-fsdp with --num-distributed-optimizer-instances 2 needs") == 1
    assert "Megatron refuses these flags" in said


def test_a_package_that_megatron_misses_late_is_one_line_unless_the_training_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def imports() -> None:
        raise ImportError("pallas is required for this attention,\n install it")

    def train() -> None:
        imports()

    its: Any = None
    made = program.Program(its, its, RecoverConfig(), 0.0)
    monkeypatch.setattr(program.Program, "_call", lambda self, run: run())
    with pytest.raises(
        UserError, match="lacks a Python package for these flags: pallas is required for this attention, "
    ):
        made._pretrain(imports)
    with pytest.raises(ImportError):
        made._pretrain(train)


@pytest.mark.parametrize(
    ("flags", "world", "most"),
    [("", 8, 8), ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 8, 2),
     ("--num-experts 4 --expert-model-parallel-size 4", 8, 2), ("", 1, 1)],
)  # fmt: skip
def test_a_run_that_never_has_the_replicas_it_must_keep_is_refused(
    monkeypatch: pytest.MonkeyPatch, flags: str, world: int, most: int
) -> None:
    values = dict(zip(*[iter(flags.replace("--", "").replace("-", "_").split())] * 2, strict=True))
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    args = argparse.Namespace(**(sizes | {name: int(value) for name, value in values.items()}))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert flag_checks._number_of_replicas(args, RecoverConfig(enabled=True, min_replicas=most)) == []
    (reason,) = flag_checks._number_of_replicas(args, RecoverConfig(enabled=True, min_replicas=most + 1))
    assert f"this run starts with {most} replicas ({world} workers, {world // most} per replica)" in reason


VPP: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers": 8}


@pytest.mark.parametrize(
    ("world", "most", "fields", "why"),
    [(4, 3, {}, "this run starts with 4 replicas"), (1, 2, {}, "needs at least two replicas at the launch"),
     (2, 13, {}, "a global batch of 12 microbatches is enough for 12 replicas"),
     (4, 6, {"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances"),
     (4, 6, {"use_megatron_fsdp": True}, "--use-megatron-fsdp"), (2, 12, {}, ""),
     (4, 7, VPP | {"num_layers_per_virtual_pipeline_stage": 1}, "12 microbatches is enough for 6 replicas"),
     (4, 7, VPP | {"num_virtual_stages_per_pipeline_rank": 2}, "of at least 2 microbatches"),
     (4, 7, VPP | {"pipeline_model_parallel_layout": "E,(tt|)*3,t*2,L"}, "is enough for 6 replicas"),
     (4, 7, VPP | {"hybrid_layer_pattern": "M-|M*|M-|M*/*-"}, "is enough for 6 replicas"),
     (4, 7, VPP | {"hybrid_override_pattern": "M|*|M|*"}, "is enough for 6 replicas"),
     (4, 6, VPP | {"num_virtual_stages_per_pipeline_rank": 2}, ""),
     (4, 7, VPP | {"num_layers_per_virtual_pipeline_stage": 4}, ""),
     (4, 7, VPP | {"hybrid_layer_pattern": "M-|M*", "num_layers_per_virtual_pipeline_stage": None}, ""),
     (4, 7, VPP | {"pipeline_model_parallel_layout": "Ett|ttL"}, "")],
)  # fmt: skip
def test_a_run_that_cannot_grow_as_far_as_it_is_told_to_is_refused(
    monkeypatch: pytest.MonkeyPatch, world: int, most: int, fields: dict[str, Any], why: str
) -> None:
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    args = argparse.Namespace(**{**sizes, **fields}, micro_batch_size=1, global_batch_size=12)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    found = flag_checks._number_of_replicas(args, RecoverConfig(enabled=True, max_replicas=most))
    assert [why in reason for reason in found] == [True] * bool(why), found


def test_each_node_tells_a_refusal_once_and_so_does_whoever_comes_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    newcomer = {"RECOVER_JOIN": "1"}
    for rank, local, more in [(0, 0, {}), (1, 1, {}), (2, 0, {}), (3, 1, {}), (1, 1, newcomer),
                              (0, 2, newcomer | {"RECOVER_SPARE": "1"})]:  # fmt: skip
        with monkeypatch.context() as environment:
            for name, value in {"RANK": rank, "LOCAL_RANK": local, **more}.items():
                environment.setenv(name, str(value))
            with pytest.raises(SystemExit, match="2"):
                refuse("program", ["the reason"])
        told.append(capsys.readouterr().err)
    assert told == ["program: error: the reason\n", "", "program: error: the reason\n", "",
                    "program: error: the reason\n", ""]  # fmt: skip


def test_all_reasons_are_told_at_once(forkserver: ForkServer, tmp_path: Path) -> None:
    argv = [*MODEL, *SCHEDULE, "--data-path", "/nowhere/corpus", "--tensor-model-parallel-size", "2", "--recover"]
    said = refusal(forkserver, tmp_path, [*argv, "--use-torch-fsdp2", "--qk-clip"], workers=3)
    assert said.splitlines()[0].startswith("pretrain_gpt_recover.py: ")
    for reason in ("the replica size 2 (", "/nowhere/corpus.bin", "--use-torch-fsdp2", "--qk-clip needs --bf16"):
        assert reason in said


def changed_functions(forkserver: ForkServer, out: Path, *flags: str) -> list[str]:
    script = str(Path(__file__).parent / "seams_report.py")
    run = forkserver.run(1, [script, *GOOD, "--train-iters", "1", "--lr-warmup-iters", "0", *flags], out)
    assert run.ok, run.tail()
    log = run.logs[0].read_text()
    assert "seams reported" in log
    return [line.removeprefix("changed: ") for line in log.splitlines() if line.startswith("changed: ")]


def test_without_recover_every_function_of_megatron_is_its_own(forkserver: ForkServer, tmp_path: Path) -> None:
    assert changed_functions(forkserver, tmp_path) == []


def test_with_recover_only_the_documented_seams_are_wrapped(forkserver: ForkServer, tmp_path: Path) -> None:
    documented = [f"{owner}.{name}" for owner, names in MONKEYPATCH.items() for name in names.split()]
    assert changed_functions(forkserver, tmp_path, "--recover") == sorted(documented)


def test_help_shows_the_group_recover(forkserver: ForkServer, tmp_path: Path) -> None:
    run = forkserver.run(2, [OURS, "--help"], tmp_path)
    assert run.codes == [0, 0]
    said = run.logs[0].read_text()
    assert "\nrecover:\n" in said
    assert "--recover-log-dir DIR" in said
    assert run.logs[1].read_text() == ""


# ---- versions: no import of torch, so plain processes ------------------------------------------------------------


def start_with(path: Path) -> subprocess.CompletedProcess[str]:
    """The entry script with ``path`` as the only place where Megatron can be found."""
    code = (
        "import sys\n"
        "sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        f"sys.path.insert(0, {str(path)!r})\n"
        "sys.argv = ['pretrain_gpt_recover.py']\n"
        "import pretrain_gpt_recover\n"
        "pretrain_gpt_recover.main()\n"
    )
    return python("-c", code, cwd=REPOSITORY)


def fake_megatron(root: Path, minor: int, *, training: bool = True, script: bool = False) -> Path:
    (root / "megatron" / "core").mkdir(parents=True)
    (root / "megatron" / "core" / "__init__.py").write_text("raise AssertionError('imported')")
    (root / "megatron" / "core" / "package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n")
    if training:
        (root / "megatron" / "training").mkdir()
        (root / "megatron" / "training" / "__init__.py").write_text("")
    if script:
        (root / "pretrain_gpt.py").write_text("")
    return root


@pytest.mark.parametrize(
    ("minor", "training", "reason"),
    [
        (17, True, "Megatron 0.17.1 in {root} is not supported (supported: Megatron 0.18 to 0.19, tested: 0.19.2)"),
        (19, False, "Megatron 0.19.1 in {root} has no megatron.training"),
        (18, True, "the wheel of Megatron 0.18.1 has no GPT builder: put a Megatron-LM checkout"),
    ],
)
def test_an_unsupported_megatron_is_refused_with_the_supported_ones(
    tmp_path: Path, minor: int, training: bool, reason: str
) -> None:
    done = start_with(fake_megatron(tmp_path, minor, training=training))
    assert done.returncode == 2
    assert reason.format(root=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_newer_megatron_is_taken_with_a_warning_and_its_seams_decide(tmp_path: Path) -> None:
    done = start_with(fake_megatron(tmp_path, 20, script=True))
    assert f"recover: warning: Megatron 0.20.1 in {tmp_path} is newer than the supported versions" in done.stderr
    assert "is not supported" not in done.stderr


def test_a_missing_megatron_is_told_with_the_command_that_installs_it(tmp_path: Path) -> None:
    done = start_with(tmp_path)
    assert done.returncode == 2
    assert "pip install megatron-core==0.19.2" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_seams_that_do_not_fit_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the loop and of Megatron-Core, methods too."""
    module = "megatron.core.parallel_state"
    others = [
        Seam(module, "create_group", ("timeout",)),
        Seam(module, "Group.close"),
        Seam("megatron.core.no", "where"),
    ]
    monkeypatch.setattr(patches, "SEAMS", patches.SEAMS | {seam.name: seam for seam in others})
    worker = FaultTolerance.__new__(FaultTolerance)
    worker.__dict__.update(_loop=Loop("mine", "1 alone", {"train": [Seam(module, "train")]}, None))  # type: ignore[arg-type]
    with pytest.raises(UserError) as told:
        worker.install()
    reasons = told.value.reasons
    assert f"--recover: mine: {module}.train does not exist (1 alone)" in reasons
    assert any(f"{module}.create_group takes (ranks, " in reason for reason in reasons)
    assert any(f"{module}.Group does not exist" in reason for reason in reasons)
    assert any("module megatron.core.no does not exist" in reason for reason in reasons)
    assert len([reason for reason in reasons if "it has no seam for" not in reason]) == 4


def train(then: Callable[[], Any] = sys.exit) -> None:
    """A loop's."""
    then()


def read_metadata(tracker_filename: str, rank: int = 0) -> None:
    sys.exit(rank)


MINE = Loop("mine", "", {"train": [Seam(__name__, "train")]}, None)  # type: ignore[arg-type]


def ended(call: Callable[[], Any], *, begun: bool = True) -> None:
    """What becomes of a worker whose pretrain() is ``call``."""
    worker = FaultTolerance.__new__(FaultTolerance)
    worker.__dict__.update(_newcomer=False, _loop=MINE, _training=SimpleNamespace(begun=begun))
    worker._train_wherever_wanted(call, lambda: None)


def test_a_loop_that_exits_has_been_asked_to_also_where_it_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    original = train
    monkeypatch.setattr(sys.modules[__name__], "train", functools.wraps(original)(lambda: original()))
    ended(train)


def test_an_exit_that_nobody_asked_for_is_an_error_that_says_where_and_of_what() -> None:
    told = rf"by read_metadata\(tracker_filename='/x/latest.txt'\), {__name__} line \d+"
    for at in (lambda: read_metadata("/x/latest.txt"), lambda: train(lambda: read_metadata("/x/latest.txt"))):
        with pytest.raises(EndedEarly, match=told):
            ended(at)


def test_an_exit_with_a_code_keeps_it() -> None:
    with pytest.raises(SystemExit, match="3"):
        ended(lambda: read_metadata("", rank=3))


@pytest.mark.parametrize("told", [True, False])
def test_a_worker_that_lost_touch_at_the_start_leaves_the_word_to_whoever_knows_of_the_loss(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    class Ended(Exception):
        pass

    def end(code: int, message: str) -> NoReturn:
        raise Ended(code, message)

    def wait_lost(workers: Sequence[int], timeout: float) -> bool:
        assert not shown
        if told:
            raise CoordinatorLost("workers 3 were lost before the first plan", EXIT_NO_REPLICA, reported=True)
        return False

    shown: list[str] = []
    monkeypatch.setattr(fault_tolerance, "_end", end)
    monkeypatch.setattr(fault_tolerance, "write_stderr", shown.append)
    worker = FaultTolerance.__new__(FaultTolerance)
    monkeypatch.setattr(fault_tolerance, "LAUNCHER_STOP_SECONDS", 0.0)
    worker.__dict__.update(_me=0, _training=SimpleNamespace(begun=False), _session=SimpleNamespace(wait_lost=wait_lost))
    with pytest.raises(Ended) as ended:
        worker._ended_by(torch.distributed.DistNetworkError("Connection closed by peer [127.0.0.1]:26026"))
    code, message = ended.value.args
    assert code == EXIT_NO_REPLICA
    assert message.endswith("3 were lost before the first plan" if told else "its traceback is above")
    assert bool(shown) is not told


def test_a_training_without_data_is_no_training() -> None:
    ended(lambda: None)
    with pytest.raises(EndedEarly, match="its training data set is empty"):
        ended(lambda: None, begun=False)


def test_megatron_ends_its_training_as_is_assumed() -> None:
    """Its train() calls sys.exit() itself, and so do its handlers, which are where they are looked for."""
    (seam,) = MEGATRON_LM.seams["train"]
    assert exits(getattr(seam.owner(), seam.name))
    for name in HANDLERS:
        modules = (global_vars, common_utils, training)
        (handler,) = {getattr(module, name) for module in modules if hasattr(module, name)}
        assert exits(handler)
        for how in ("sys.exit(0)", "exit()"):
            namespace: dict[str, Any] = {"__name__": handler.__module__}
            exec(f"import sys\ndef {name}():\n    {how}", namespace)
            ended(namespace[name], begun=False)


def exits(function: Callable[..., Any]) -> bool:
    """Whether it calls sys.exit() itself."""
    tree = ast.parse(inspect.getsource(inspect.unwrap(function)))
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "exit") for node in ast.walk(tree))


FLAGS = (
    "--rerun-mode validate_results --fp16 --moe-token-dispatcher-type flex --cuda-graph-impl transformer_engine "
    "--tp-comm-overlap --overlap-moe-expert-parallel-comm --delay-wgrad-compute --use-sharp --use-nccl-ub "
    "--overlap-param-gather-with-optimizer-step --log-straggler --log-max-attention-logit --error-injection-rate 9 "
    "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --optimizer muon --use-distributed-optimizer "
    "--use-megatron-fsdp --use-precision-aware-optimizer "
    "--distributed-timeout-seconds-after-init 60 --gpu-sniff-test-interval 9 --defer-embedding-wgrad-compute "
    "--async-save --async-strategy mcore"
).split()
ADJUSTED = [its for its in refused.ADJUSTED if its.flag != "--optimizer dist_muon"]
"""Each of these by one of the flags."""


def parsed(enabled: bool, *flags: str) -> argparse.Namespace:
    config = RecoverConfig(enabled=enabled)
    parser = arguments_provider(config)(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    return parser.parse_args(list(flags))


def test_every_flag_that_is_done_in_another_way_is_set_so_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused.say.cache_clear()
    said: list[str] = []
    monkeypatch.setattr(refused.log, "info", said.append)
    args = parsed(True, *FLAGS)
    assert all(not its.given(args) for its in refused.ADJUSTED)
    assert (args.moe_token_dispatcher_type, args.cuda_graph_impl) == ("alltoall", "none")
    assert (args.optimizer, args.use_distributed_optimizer, args.fp8_param_gather) == ("muon", False, False)
    assert (args.num_distributed_optimizer_instances, args.error_injection_rate) == (2, 0)
    assert (args.rerun_mode, args.accumulate_allreduce_grads_in_fp32) == ("disabled", True)
    parsed(True, *FLAGS)
    assert said == [f"with --recover, {its}" for its in ADJUSTED]
    config = RecoverConfig(enabled=True)
    assert [*cannot_recover(args, config), *cannot_shard(args, config)] == []


def test_without_recover_every_flag_is_as_megatron_has_it() -> None:
    args = parsed(False, *FLAGS)
    assert all(its.given(args) for its in ADJUSTED)


def test_the_old_name_of_spread_muon_is_muon_that_is_not_spread() -> None:
    args = parsed(True, "--optimizer", "dist_muon", "--overlap-param-gather")
    assert (args.optimizer, args.use_distributed_optimizer, args.overlap_param_gather) == ("muon", False, False)
    assert refused.refuse_unadjusted(args) == []


@pytest.mark.parametrize(
    ("on_host", "backend", "collective", "told"),
    [
        (True, "gloo", "ring", []),
        (False, "nccl", "native", []),
        (True, "gloo", "native", ["--recover-collective native"]),
        (False, "gloo", "auto", ["--distributed-backend gloo"]),
    ],
)
def test_gradients_travel_by_the_ring_on_the_cpu_and_over_nccl_on_gpus(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, backend: str, collective: str, told: list[str]
) -> None:
    args = parsed(True, "--distributed-backend", backend)
    monkeypatch.setattr(hostdevice, "is_active", lambda: on_host)
    found = cannot_recover(args, RecoverConfig(enabled=True, collective=collective))
    assert len(found) == len(told)
    assert all(flag in reason for flag, reason in zip(told, found, strict=True))


@pytest.mark.parametrize(
    ("here", "said"), [(None, "No package metadata was found for nccl4py"), ("0.5.0", "0.5.0 is too old")]
)
def test_what_nccl_lacks_is_told_with_the_flags_and_on_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, here: str | None, said: str
) -> None:
    def version(package: str) -> str:
        if here is None:
            raise PackageNotFoundError(package)
        return here

    monkeypatch.setattr(library, "version", version)
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    monkeypatch.setattr(torch_nccl, "keep_one_kind", lambda: ["of another kind"])
    args = parsed(True, "--distributed-backend", "gloo")
    monkeypatch.setattr(hostdevice, "is_active", lambda: False)
    reasons = flags.problems(args, RecoverConfig(enabled=True))
    for one in ("--distributed-backend gloo", "of another kind", said, "pip install 'nccl4py>=0.6,<0.7'"):
        assert any(one in reason for reason in reasons), one
    monkeypatch.setattr(hostdevice, "is_active", lambda: True)
    assert refused.cannot_use_nccl(RecoverConfig()) == []


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon", "lion"])
def test_a_package_that_an_optimizer_needs_and_that_is_not_here_is_named(
    monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    monkeypatch.setattr(flags, "_installed", lambda module: module != "emerging_optimizers")
    reasons = flags.problems(parsed(True, "--optimizer", optimizer), RecoverConfig(enabled=True))
    wanted = "--optimizer {} needs the Python package emerging-optimizers, which is not installed"
    assert any(wanted.format(optimizer.removeprefix("dist_")) in reason for reason in reasons)


SPREAD = "--num-experts 64 --moe-grouped-gemm --expert-model-parallel-size 8 --moe-token-dispatcher-type"
FSDP = "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor"
WITH_COMPANIONS = [
    f"{SPREAD} flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash "
    "--use-transformer-engine-op-fuser --moe-hybridep-num-sms 16",
    f"{SPREAD} flex --moe-flex-dispatcher-backend ncclep --moe-ncclep-static-shape --moe-ncclep-zero-copy",
    f"{SPREAD} flex --moe-enable-deepep --moe-deepep-num-sms 20",
    "--cuda-graph-impl full_iteration --optimizer-cuda-graph --te-rng-tracker --no-check-for-nan-in-loss-and-grad",
    "--cuda-graph-impl transformer_engine --cuda-graph-modules attn --te-rng-tracker --delay-offload-until-cuda-graph "
    "--fine-grained-activation-offloading --offload-modules core_attn",
    "--external-cuda-graph --te-rng-tracker --cuda-graph-scope attn",
    "--tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-rs-dgrad",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format e4m3 --fp8-recipe mxfp8 "
    "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag",
    "--use-distributed-optimizer --use-nccl-ub --overlap-grad-reduce",
    "--use-sharp --sharp-enabled-group dp",
    "--optimizer muon --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    f"{FSDP} --fsdp-double-buffer --use-nccl-ub --fsdp-manual-registration --untie-embeddings-and-output-weights",
]
"""What is switched off or done in another way, each with flags that belong to it in NVIDIA's configurations."""


@pytest.mark.parametrize("given", WITH_COMPANIONS)
def test_what_is_switched_off_leaves_nothing_behind_that_megatron_refuses(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """On a Blackwell with Transformer Engine, as far as Megatron looks at either when it checks its flags."""
    device = SimpleNamespace(name="B200", major=10, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device_=None: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device_=None: (10, 0))
    monkeypatch.setattr(core_utils, "_te_version", Version("2.14.0"))
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1"):
        monkeypatch.setenv(variable, "1")
    if "fsdp" in given:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    fixed = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 64 --max-position-embeddings 64 "
    fixed += (
        "--micro-batch-size 1 --global-batch-size 64 --train-iters 1 --bf16 --vocab-size 128 --lr 1e-3 --mock-data "
    )
    fixed += "--disable-bias-linear --no-rope-fusion --no-gradient-accumulation-fusion --tokenizer-type NullTokenizer"
    for enabled in (False, True):
        args = parsed(enabled, *fixed.split(), *given.split())
        args.rank, args.world_size = 0, 64
        arguments.validate_args(args)
        arguments.core_transformer_config_from_args(args)


def test_every_flag_that_is_refused_or_settled_is_one_of_megatrons() -> None:
    """By another name it would never be."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {flag for action in parser._actions for flag in action.option_strings}
    known |= {"--ckpt-pg-tensors-cache-path", "--megatron-fsdp-version"}  # of 0.20
    named = set(re.findall(r"--(?!recover)[a-z][a-z0-9-]+", Path(refused.__file__).read_text(encoding="utf-8")))
    assert named - known <= {"--ckpt-pg-tensors-cache-path", "--megatron-fsdp-version"}  # Megatron 0.20 has them


def test_a_script_may_require_flags_of_its_own() -> None:
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--kind", required=True)
    flags._make_defaults(parser, hostdevice.host_defaults())
    assert parser.parse_args(["--kind", "one"]).transformer_impl == "local"
    with pytest.raises(SystemExit):
        parser.parse_args([])


def test_what_comes_past_the_parser_is_refused_and_not_run_as_it_is() -> None:
    args = parsed(False, *FLAGS)
    assert len(refused.refuse_unadjusted(args)) == len(ADJUSTED)
    assert refused.refuse_unadjusted(parsed(True, *FLAGS)) == []
    args.yaml_cfg = "model.yaml"
    reasons = flags.problems(args, RecoverConfig(enabled=True))
    assert any("--moe-token-dispatcher-type flex from a --yaml-cfg file" in reason for reason in reasons)


def test_a_flag_that_was_not_given_is_not_touched() -> None:
    with_recover, without = vars(parsed(True)), vars(parsed(False))
    assert {name for name in without if with_recover[name] != without[name]} <= {"rerun_mode"}


def test_why_the_sizes_of_a_checkpoint_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Megatron says it and exits with status 0: while flags are checked nobody would see either."""
    folder = tmp_path / "iter_0000004" / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_text("cut off")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    args = parsed(True, "--use-checkpoint-args", "--load", str(tmp_path))
    with pytest.raises(UserError, match=r"--use-checkpoint-args: Megatron would exit: .*could not load the checkpoint"):
        with_checkpoint_args(args)
    with pytest.raises(UserError, match="--use-checkpoint-args needs a checkpoint: give --load FOLDER"):
        with_checkpoint_args(parsed(True, "--use-checkpoint-args"))


def test_flags_are_checked_with_the_sizes_that_the_checkpoint_has(forkserver: ForkServer, tmp_path: Path) -> None:
    """Those of the model, and, with another flag, of a replica: two workers, which three are no multiple of."""
    names = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")
    folder = tmp_path / "saved" / "iter_0000004" / "mp_rank_00"
    folder.mkdir(parents=True)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("4")
    saved = {"args": parsed(True, *MODEL, "--tensor-model-parallel-size", "2"), "iteration": 4}
    torch.save(saved | {"checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
    words = [word for at, word in enumerate(GOOD) if not {*names} & {*GOOD[max(0, at - 1) : at + 1]}]
    words += ["--use-checkpoint-args", "--load", str(tmp_path / "saved"), "--ckpt-format", "torch"]
    words += ["--use-mp-args-from-checkpoint-args"]
    said = refusal(forkserver, tmp_path, [*words, "--recover"], workers=3)
    assert "3 workers are not a multiple of the replica size 2 (--tensor-model-parallel-size 2)" in said
    words += ["--tensor-model-parallel-size", "4", "--global-batch-size", "15"]
    said = refusal(forkserver, tmp_path, words, workers=2)
    assert "global batch size 15 is not a multiple of micro batch size 2 x 1" in said


def scheduled(batches: str, **others: Any) -> argparse.Namespace:
    """A schedule of batches, by tokens: micro batches of two samples of 32."""
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    args = {"micro_batch_size": 2, "seq_length": 32, "step_batch_size_schedule": batches, "train_iters": 20, **sizes}
    return argparse.Namespace(**args | others)


@pytest.mark.parametrize(
    ("batches", "others", "words"),
    [("0:6 1536:12", {}, []),
     ("0:6 1536:8", {}, ["batch size 8 of --step-batch-size-schedule is not a multiple of micro batch size 2 x 3"]),
     ("0:6 1536:8", {"train_iters": None, "train_samples": 48}, []),
     ("0:6 1536:8", {"train_iters": None, "train_samples": 49}, ["batch size 8 of"]),
     ("0:6 1536:8", {"train_iters": 8}, []),
     ("0:6 1536:8", {"train_iters": 9}, ["batch size 8 of"]),
     ("0:6 1536:8", {"exit_interval": 8}, []),
     ("0:12 32:8 384:6", {}, ["batch 6 follows batch 12, but Megatron does not accept a batch with fewer"]),
     ("0:7 1536:8", {}, ["batch size 7 of", "batch size 8 of"]),
     ("nonsense", {}, [])],
)  # fmt: skip
def test_every_batch_of_a_schedule_that_comes_must_divide(
    batches: str, others: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By three data-parallel ranks; others than come are as the user likes."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    reasons = flag_checks._layout(scheduled(batches, **others))
    assert len(reasons) == len(words), reasons
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))


def test_a_batch_that_does_not_divide_is_refused_though_it_is_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """--rampup-batch-size is only parsed: Megatron takes the global batch from the first iteration on."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    args = parsed(True, *"--micro-batch-size 2 --global-batch-size 8 --rampup-batch-size 6 6 48".split())
    (reason,) = flag_checks._layout(args)
    assert reason.startswith("global batch size 8 is not a multiple of micro batch size 2 x 3 data-parallel ranks")


@pytest.mark.parametrize("error", ["RuntimeError('empty meta package')", "OSError('no libcudart.so')"])
def test_a_transformer_engine_that_cannot_be_imported_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str
) -> None:
    """The package transformer-engine alone raises RuntimeError, a core library without CUDA's OSError."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text(f"raise {error}")
    (tmp_path / "needs_it.py").write_text("import transformer_engine")
    (tmp_path / "is_broken.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    megatron = SimpleNamespace(has_script=True)
    monkeypatch.setattr(program, "SCRIPT", "needs_it")
    with pytest.raises(UserError, match=r"Install transformer-engine\[pytorch\] .* or remove it: pip uninstall"):
        program._import_all(megatron)  # type: ignore[arg-type]
    monkeypatch.setattr(program, "SCRIPT", "is_broken")
    with pytest.raises((RuntimeError, OSError), match=r"empty meta|no libcudart"):
        program._import_all(megatron)  # type: ignore[arg-type]


def test_flags_that_megatron_takes_and_does_not_follow_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flag_checks._warn.cache_clear()
    told: list[str] = []
    monkeypatch.setattr(flag_checks.log, "warning", told.append)
    monkeypatch.delenv("RANK", raising=False)
    parsed(True, *"--train-iters 20".split(), "--step-batch-size-schedule", "0:6 1536:12")
    parsed(True, *"--rampup-batch-size 6 6 48 --global-batch-size 8".split())
    parsed(True, *"--train-iters 20".split(), "--step-batch-size-schedule", "0:6 1536:12")
    parsed(True, *"--train-samples 48".split(), "--step-batch-size-schedule", "0:6 1536:12")
    parsed(False, *"--rampup-batch-size 6 6 48".split())
    assert [line.split(":")[0] for line in told] == [
        "--step-batch-size-schedule with --train-iters",
        "--rampup-batch-size",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"load": "HERE", "save": "HERE", "dist_ckpt_strictness": "log_all"}, "refused"),
        ({"load": "EMPTY", "save": "EMPTY", "dist_ckpt_strictness": "log_all"}, "warned"),
        ({"save": "EMPTY", "dist_ckpt_strictness": "raise_unexpected"}, "warned"),
        ({"load": "HERE", "dist_ckpt_strictness": "log_all", "ckpt_format": "torch"}, ""),
        ({"load": "HERE", "dist_ckpt_strictness": "assume_ok_unexpected"}, ""),
        ({"load": "HERE"}, ""),
        ({"dist_ckpt_strictness": "log_all"}, ""),
    ],
)
def test_checks_of_a_checkpoint_with_which_none_can_be_loaded_are_told_of_or_refused(
    tmp_path: Path, given: dict[str, str], words: str
) -> None:
    """As it is with a torch whose properties of a tensor are no arguments of ``torch.empty``."""
    properties = TensorProperties.create_from_tensor(torch.zeros(2))
    try:
        torch.empty(2, **vars(properties), device="meta")
        words = ""
    except TypeError:
        pass
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    folders = {"HERE": str(tmp_path), "EMPTY": str(tmp_path / "none")}
    args = argparse.Namespace(**{name: folders.get(value, value) for name, value in given.items()})
    assert bool(flag_checks._strictness(args)) == (words == "refused")
    assert bool(flag_checks.remarks(args)) == (words == "warned")


@pytest.mark.parametrize(
    ("recover", "given", "rank", "local", "tried"),
    [
        (True, {"ckpt_format": "torch"}, "8", "0", True),
        (True, {"ckpt_format": "torch_dist"}, "9", "1", False),
        (False, {"ckpt_format": "torch_dist"}, "8", "0", True),
        (False, {"ckpt_format": "torch_dist", "ckpt_fully_parallel_save": False}, "8", "0", False),
        (False, {"ckpt_format": "torch"}, "8", "0", False),
        (False, {"ckpt_format": "torch"}, "0", "0", True),
    ],
)
def test_one_worker_of_each_host_that_may_write_tries_the_folder_of_checkpoints(
    monkeypatch: pytest.MonkeyPatch, recover: bool, given: dict[str, Any], rank: str, local: str, tried: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    args = argparse.Namespace(save="/proc/none", **given)
    reasons = flag_checks._folders(args, RecoverConfig(enabled=recover))
    told = f"--save /proc/none: No such file or directory on host {socket.gethostname()}; choose"
    assert [reason.startswith(told) for reason in reasons] == [True] * tried


def test_of_a_run_that_resumes_the_batches_before_it_are_left_alone(tmp_path: Path) -> None:
    """More workers than it began with may not take the first ones; Megatron would not look at them either."""
    args = scheduled("0:6 1536:8", load=str(tmp_path), data_parallel_size=4, consumed_train_samples=48, iteration=8)
    assert batches_to_come(args) == [6, 8], "there is no checkpoint in it"
    for untold in ({"ckpt_step": 8}, {"non_persistent_ckpt_type": "global"}):
        assert batches_to_come(argparse.Namespace(**vars(args) | untold)) == [], "loaded without a tracker file"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    assert batches_to_come(args) == []
    _check_batches(args)
    args.consumed_train_samples = 42
    with pytest.raises(UserError, match="batch size 6 of --step-batch-size-schedule is not a multiple of"):
        _check_batches(args)


def test_each_batch_of_a_schedule_must_have_enough_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the replicas that the run may grow to, and for the groups of an interleaved pipeline."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = scheduled("0:6 1536:16", dataloader_type="single", microbatch_group_size_per_vp_stage=5)
    reasons = refused.cannot_grow(args, RecoverConfig(enabled=True, max_replicas=4), 2, 1)
    assert ["a global batch of 3 microbatches is enough for 3" in reason for reason in reasons] == [True]
    args.pipeline_model_parallel_size = 4
    reasons = refused._groups_of_microbatches(args)
    assert [" cannot run the 3 microbatches of a rank" in reason for reason in reasons] == [True, False]


@pytest.mark.parametrize(("flags", "taken"), [("--bf16", True), ("", False), ("--bf16 --use-megatron-fsdp", False)])
def test_the_largest_attention_logit_is_logged_where_megatron_finds_it(flags: str, taken: bool) -> None:
    assert parsed(True, "--log-max-attention-logit", *flags.split()).log_max_attention_logit is taken


AWARE = "--use-precision-aware-optimizer --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [("--qk-clip --bf16", None), ("--qk-clip", "--qk-clip needs --bf16 or --fp16"),
     ("--qk-clip --fp16 --tensor-model-parallel-size 2 --multi-latent-attention", None),
     ("--qk-clip --bf16 --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 needs --multi-latent"),
     ("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode blockwise", None),
     ("--optimizer muon --muon-tp-mode duplicated", None),
     ("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode duplicated", "--muon-tp-mode duplicated"),
     ("--use-precision-aware-optimizer", "without --use-distributed-optimizer"),
     ("--freeze-all-layers", "trains nothing (--skip-train, --train-iters 0, --freeze-all-layers)"),
     (AWARE, None),
     (f"{AWARE} --main-params-dtype fp16", "is scaled by the shard's largest element"),
     (f"{AWARE} --exp-avg-dtype fp16", "is scaled by the shard's largest element"),
     (f"{AWARE} --exp-avg-sq-dtype fp8", "is scaled by the shard's largest element"),
     (f"{AWARE} --exp-avg-dtype bf16", "only with --recover-untested"),
     (f"{AWARE} --main-grads-dtype bf16", "only with --recover-untested"),
     (f"{AWARE} --optimizer-cpu-offload", "with --optimizer-cpu-offload yet")],
)  # fmt: skip
def test_what_trains_otherwise_or_asks_others_in_the_update_or_ends_megatron_itself_is_refused(
    flags: str, reason: str | None
) -> None:
    args, config = parsed(True, *flags.split()), RecoverConfig(enabled=True)
    found = [*cannot_recover(args, config), *cannot_shard(args, config)]
    assert any(reason in its for its in found) if reason else found == []
    if reason == "only with --recover-untested":
        assert not any(reason in its for its in cannot_recover(args, RecoverConfig(enabled=True, untested=True)))
