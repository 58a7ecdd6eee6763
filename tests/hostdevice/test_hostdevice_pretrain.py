"""Megatron's own pretrain() runs on the host device, and resumes to the last bit."""

import re

import pytest

from recover_megatron.hostdevice import host_defaults
from tests.megatron_hooks.tiny import OURS, STOCK, losses

pytestmark = pytest.mark.slow
ITERATIONS = 6
MODEL = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
--lr-warmup-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 1
--log-interval 1 --eval-interval 1000 --eval-iters 0 --split 90,9,1 --num-workers 0
"""


@pytest.fixture
def pretrain(forkserver, tmp_path):
    """Run jobs (name, workers, flags) one after the other: {name: what the finished run left}."""

    def run(*jobs, script=STOCK):
        done = {}
        for name, workers, flags in jobs:
            argv = [script, *host_defaults(), *MODEL.split(), *flags.split()]
            done[name] = forkserver.run(workers, argv, tmp_path / name, losses=tmp_path / name / "losses.jsonl")
            assert done[name].ok, done[name].tail()
        return done

    return run


def steps(run):
    """[(iteration, loss, grad norm), ...] as Megatron logged them."""
    logs = "".join(log.read_text() for log in run.logs)
    return re.findall(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+)", logs)


def exact(run):
    """The same of each iteration to the last digit."""
    return losses(run.logs[0].with_name("losses.jsonl"))


def exact_losses(run):
    return [row["loss"] for row in exact(run)]


def falls(run):
    """Whether there are all the steps and the loss went down."""
    seen = steps(run)
    return [int(i) for i, _, _ in seen] == list(range(1, ITERATIONS + 1)) and float(seen[-1][1]) < float(seen[0][1])


def goes_on(done):
    """Whether job "second", resumed half way from job "first", computed exactly what job "whole" did."""
    whole, first, second = (exact(done[name]) for name in ("whole", "first", "second"))
    assert (len(whole), len(first)) == (ITERATIONS, ITERATIONS // 2)
    return first + second == whole


def test_the_layouts_of_a_gpu_run_train_on_the_host(pretrain):
    optimizer = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    experts = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --expert-model-parallel-size 2"
    done = pretrain(
        ("one", 1, "--num-workers 1 --eval-interval 3 --eval-iters 1 --timing-log-level 2 --log-memory-interval 2"),
        ("recomputed", 1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        ("data", 2, ""),
        ("sharded", 2, optimizer),
        ("half", 2, f"--bf16 {optimizer}"),
        ("scaled", 1, "--fp16 --initial-loss-scale 1024 --position-embedding-type rope"),
        ("tensor", 2, "--tensor-model-parallel-size 2 --sequence-parallel --normalization RMSNorm --swiglu"),
        ("pipeline", 2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4"),
        ("experts", 2, f"{experts} --moe-token-dispatcher-type alltoall"),
    )
    assert [name for name, run in done.items() if not falls(run)] == []
    assert steps(done["recomputed"]) == steps(done["one"]), "recomputation must see the same dropout"
    assert exact_losses(done["sharded"]) == exact_losses(done["data"]), "float32 shards hold the same sums"
    assert exact_losses(done["half"]) != exact_losses(done["sharded"])


def test_megatron_fsdp_trains_as_data_parallelism_does_if_its_instances_sum(pretrain):
    fsdp = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer "
        "--ckpt-format fsdp_dtensor"
    )
    instances = f"{fsdp} --num-distributed-optimizer-instances 2"
    done = pretrain(
        ("data", 4, "--global-batch-size 16"),
        ("sharded", 4, f"--global-batch-size 16 {fsdp}"),
        ("hybrid", 4, f"--global-batch-size 16 {instances} --overlap-grad-reduce"),
        ("apart", 4, f"--global-batch-size 16 {instances}"),
    )
    assert falls(done["data"])
    assert steps(done["sharded"]) == steps(done["hybrid"]) == steps(done["data"])
    assert [log.read_text().count("needs --overlap-grad-reduce") for log in done["apart"].logs] == [1, 0, 0, 0]
    others = done["hybrid"].logs + done["sharded"].logs
    assert not any("needs --overlap-grad-reduce" in log.read_text() for log in others)
    # Why it warns: each instance steps with gradients of its own.  If this fails Megatron has mended it.
    assert steps(done["apart"])[0][1] == steps(done["data"])[0][1]
    assert steps(done["apart"])[0][2] != steps(done["data"])[0][2]


def test_torchs_fsdp2_trains_as_data_parallelism_does(pretrain, tmp_path):
    untied = "--untie-embeddings-and-output-weights"
    saved = f"--save {tmp_path / 'checkpoint'} --save-interval 3"
    done = pretrain(
        ("data", 2, untied),
        ("sharded", 2, f"{untied} --use-torch-fsdp2 --ckpt-format torch_dcp {saved}"),
    )
    assert falls(done["data"])
    assert steps(done["sharded"]) == steps(done["data"])


@pytest.mark.parametrize("saving", ["", "--async-save --async-strategy mcore"], ids=["sync", "async"])
def test_a_resumed_run_goes_on_to_the_last_bit(pretrain, tmp_path, saving):
    flags = f"--bf16 --use-distributed-optimizer --ckpt-format torch_dist {saving}"
    folder = tmp_path / "checkpoint"
    done = pretrain(
        ("whole", 2, flags),
        ("first", 2, f"{flags} --save {folder} --save-interval 3 --exit-interval 3"),
        ("second", 2, f"{flags} --load {folder}"),
    )
    assert falls(done["whole"])
    assert goes_on(done)


def test_float32_shards_and_a_persistent_writer_resume_too(pretrain, tmp_path):
    flags = "--use-distributed-optimizer --async-save --async-strategy mcore --use-persistent-ckpt-worker"
    folder = tmp_path / "checkpoint"
    done = pretrain(
        ("whole", 2, "--use-distributed-optimizer"),
        ("first", 2, f"{flags} --save {folder} --save-interval 3 --exit-interval 3"),
        ("second", 2, f"--use-distributed-optimizer --load {folder}"),
        script=OURS,  # which the process that writes imports, so that it has the host device, too
    )
    assert goes_on(done)
