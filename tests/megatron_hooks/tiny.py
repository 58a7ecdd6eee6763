"""The tiny GPT of the tests: flags, and what a run left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from recover_megatron.run_log.steps import StepRecord, read_steps
from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer

OURS = str(REPOSITORY / "pretrain_gpt_recover.py")
CHECKOUT = os.environ.get("MEGATRON_LM_CHECKOUT")
STOCK = f"{CHECKOUT}/pretrain_gpt.py" if CHECKOUT else str(Path(__file__).parent / "reference_gpt.py")
"""Megatron-LM's own script where there is a checkout of tag core_v0.19.0, else the plain one beside this file."""

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --tokenizer-type NullTokenizer "
    "--vocab-size 127 --make-vocab-size-divisible-by 1 --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--attention-softmax-in-fp32 --distributed-backend gloo --log-interval 1 --eval-interval 1000 --eval-iters 0 "
    "--split 99,1,0 --num-workers 0"
).split()
"""Complete for Megatron's own script too: nothing here relies on defaults that recover_megatron changes."""

SCHEDULE = "--global-batch-size 16 --train-iters 20 --lr-warmup-iters 2".split()
ASYNCHRONOUSLY = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
"""Without the worker that stays, Megatron 0.19 saves synchronously, and says so in one line."""
MOCK = ["--mock-data"]
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()


ALL_DOCUMENTS = 100_000
"""Of Megatron's mock data, in a run that nobody has told otherwise (``ForkServer.run``)."""


def undisturbed(server: ForkServer, workers: int, argv: Sequence[str], folder: Path) -> list[StepRecord]:
    """The steps of a training with ``argv`` (script first, --recover in it) in which nobody dies.

    They are those of recover-run with as many workers, whose processes each import Megatron for themselves.
    """
    ended = server.run(workers, [*argv, "--recover-log-dir", str(folder)], folder, documents=ALL_DOCUMENTS)
    assert ended.ok, ended.tail()
    return list(read_steps(folder / "steps.jsonl"))


def losses(path: Path) -> list[dict[str, float]]:
    """What the fork server recorded: loss and grad norm of each iteration, all digits."""
    return [json.loads(line) for line in path.read_text().splitlines()]
