"""What the entry script refuses, how it says so, and what it touches of Megatron."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkserver import REPOSITORY, ForkServer
from tests.megatron_hooks.tiny import MOCK, MODEL, OURS, SCHEDULE

GOOD = [*MODEL, *SCHEDULE, *MOCK]
SEAMS = [
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel._make_backward_post_hook",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.finish_grad_sync",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.finish_param_sync",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_param_sync",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.__init__",
    "megatron.core.parallel_state.create_group",
    "megatron.core.pipeline_parallel.schedules.forward_step_calc_loss",
    "megatron.training.initialize._initialize_distributed",
    "megatron.training.training.build_pretraining_data_loader",
    "megatron.training.training.build_train_valid_test_data_loaders",
    "megatron.training.training.evaluate",
    "megatron.training.training.get_forward_backward_func",
    "megatron.training.training.load_checkpoint",
    "megatron.training.training.maybe_finalize_async_save",
    "megatron.training.training.save_checkpoint",
    "megatron.training.training.train",
    "megatron.training.training.train_step",
    "megatron.training.training.training_log",
]


def refusal(forkserver: ForkServer, out: Path, argv: list[str], workers: int = 1) -> str:
    """What worker 0 says; asserts that every worker refused, and that the others said nothing."""
    run = forkserver.run(workers, [OURS, *argv], out, timeout=60, together=False)
    assert run.codes == [2] * workers, run.tail()
    for other in run.logs[1:]:
        assert other.read_text() == ""
    said = run.logs[0].read_text()
    assert "Traceback" not in said
    return said


def test_a_world_that_cannot_hold_whole_replicas_is_refused_once_with_the_remedy(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    said = refusal(forkserver, tmp_path, [*GOOD, "--tensor-model-parallel-size", "2"], workers=3)
    assert said == (
        "pretrain_gpt_recover.py: error: 3 workers cannot hold whole replicas of 2 (--tensor-model-parallel-size 2): "
        "start a multiple of 2 workers (recover-run --nproc-per-node, --nnodes) or change these sizes\n"
    )


def test_an_unknown_flag_is_named_with_the_one_that_was_meant(forkserver: ForkServer, tmp_path: Path) -> None:
    said = refusal(forkserver, tmp_path, [*GOOD, "--tensor-parallel-sise", "2"])
    assert "unknown flag --tensor-parallel-sise" in said
    assert len(said.splitlines()) == 1
    assert "--recover-log-dir" in refusal(forkserver, tmp_path, [*GOOD, "--recover-logdir", "x"])


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([*MODEL, *SCHEDULE], "no training data: give --data-path PREFIX"),
        ([*MODEL, *SCHEDULE, "--data-path", "/nowhere/corpus"], "no /nowhere/corpus.bin and /nowhere/corpus.idx here"),
        ([*MODEL, *SCHEDULE, "--data-path", "0.3", "/nowhere/a", "0.7", "/nowhere/b"], "--data-path /nowhere/b: no"),
        ([*GOOD, "--vocab-file", "/nowhere/vocab.json"], "--vocab-file /nowhere/vocab.json: no such file"),
        ([*GOOD, "--recover-device", "tpu"], "argument --recover-device: invalid choice: 'tpu'"),
        ([*GOOD, "--global-batch-size", "15"], "global batch size 15 is not a multiple of micro batch size 2 x 1"),
        ([*GOOD, "--num-layers", "four"], "argument --num-layers: invalid int value: 'four'"),
        ([*GOOD, "--hidden-size", "33"], "Megatron refuses these flags"),
        ([*GOOD, "--recover", "--dataloader-type", "cyclic"], "--recover needs --dataloader-type single"),
        ([*GOOD, "--recover", "--recover-log-dir", "/proc/nowhere"], "--recover-log-dir /proc/nowhere: "),
        ([*GOOD, "--recover", "--recover-min-replicas", "0"], "--recover-min-replicas 0: give 1 or more"),
        ([*GOOD, "--recover", "--rerun-mode", "validate_results"], "--recover needs --rerun-mode disabled"),
        (
            [*GOOD, "--recover", "--inprocess-restart"],
            "--recover cannot be combined with --inprocess-restart yet: when",
        ),
        (
            [*GOOD, "--recover", "--enable-ft-package"],
            "--recover cannot be combined with --enable-ft-package yet: its",
        ),
        ([*GOOD, "--transformer-impl", "transformer_engine"], "needs TransformerEngine's GPU kernels"),
        ([*GOOD, "--context-parallel-size", "1", "--data-path", "/no where/a"], "no /no where/a.bin"),
    ],
)
def test_bad_input_is_one_clear_message(forkserver: ForkServer, tmp_path: Path, argv: list[str], reason: str) -> None:
    assert reason in refusal(forkserver, tmp_path, argv)


def test_all_reasons_are_told_at_once(forkserver: ForkServer, tmp_path: Path) -> None:
    argv = [*MODEL, *SCHEDULE, "--data-path", "/nowhere/corpus", "--tensor-model-parallel-size", "2", "--recover"]
    said = refusal(forkserver, tmp_path, [*argv, "--use-torch-fsdp2", "--cuda-graph-impl", "local"], workers=3)
    assert said.splitlines()[0].startswith("pretrain_gpt_recover.py: ")
    for reason in ("cannot hold whole replicas", "/nowhere/corpus.bin", "--use-torch-fsdp2", "CUDA graphs"):
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
    assert changed_functions(forkserver, tmp_path, "--recover") == SEAMS


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
    return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


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
        (16, True, "Megatron 0.16.1 in {root} is not supported (supported: Megatron 0.17 to 0.19, tested: 0.19.2)"),
        (20, True, "Megatron 0.20.1 in {root} is not supported"),
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


def test_a_missing_megatron_is_told_with_the_command_that_installs_it(tmp_path: Path) -> None:
    done = start_with(tmp_path)
    assert done.returncode == 2
    assert "pip install megatron-core==0.19.2" in done.stderr
    assert "Traceback" not in done.stderr
