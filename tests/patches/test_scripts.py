"""NVIDIA's other scripts of a patched checkout, unchanged: a run with deaths equals the run of the script alone.

    MEGATRON_LM_CHECKOUTS=/path/to/core_v0.18.2:/path/to/core_v0.19.0 bash scripts/test.sh --all tests/patches

T5 and BERT mask words of documents that are made here; the vision-language model has Megatron's mock data.  The script
alone runs on the host device in two workers; with --recover there are two replicas of two, of whom one is killed within
a step.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

from recover_megatron.run_log.steps import audit_problem, read_steps
from tests.instep.runs import GRAD_NORM, LOSS
from tests.megatron_hooks.tiny import NO_DROPOUT
from tests.patches.conftest import apply, copy_of, launch
from tests.patches.test_checkouts import CHECKOUTS, WHY_NOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.checkout,
    pytest.mark.skipif(not CHECKOUTS, reason=WHY_NOT),
    pytest.mark.xdist_group("checkouts"),
]

ITERATIONS = 6
COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 12 --lr 0.01 --min-lr 0.003 "
    "--lr-decay-iters 100 --adam-eps 1e-4 --transformer-impl local --distributed-backend gloo --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --log-interval 1 "
    f"--train-iters {ITERATIONS} --eval-interval 4 --eval-iters 1 --split 80,10,10 --num-workers 0 "
    "--make-vocab-size-divisible-by 8"
).split()
HEADS = [f"<extra_id_{number}>" for number in range(20)]


@dataclass(frozen=True)
class Script:
    """A script, the flags of its model and data, and how the model is split over two workers."""

    path: str
    flags: str
    split: str
    masked: bool = True


SCRIPTS = {
    "t5": Script(
        "examples/t5/pretrain_t5.py",
        "--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 48 --decoder-seq-length 24 "
        f"--max-position-embeddings 48 --tokenizer-special-tokens {' '.join(HEADS)}",
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "bert": Script(
        "examples/bert/pretrain_bert.py",
        "--num-layers 2 --seq-length 48 --max-position-embeddings 48",
        "--pipeline-model-parallel-size 2",
    ),
    "vlm": Script(
        "pretrain_vlm.py",
        "--encoder-num-layers 2 --decoder-num-layers 2 --img-h 28 --img-w 28 --patch-dim 14 --seq-length 32 "
        "--dataloader-seq-length 32 --max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 127 "
        "--mock-data --ckpt-format torch",
        "--pipeline-model-parallel-size 2",
        masked=False,
    ),
}
KILLS = "3@3:backward#1"
LOGGED = re.compile(r" iteration +(\d+)/.* lm loss: (\S+) .* grad norm: (\S+) ")
EVALUATED = re.compile(r"validation loss at iteration (\d+).* lm loss value: (\S+) ")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of documents of several sentences, of words that have parts, and of a tokenizer that knows them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder, source = tmp_path_factory.mktemp("documents"), random.Random(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"{start}w{n}" for n in range(60) for start in ("", "##"))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=numpy.int32)
    for _ in range(200):
        lengths = [source.randrange(4, 20) for _ in range(source.randrange(3, 9))]
        tokens = [source.randrange(5, len(words)) for _ in range(sum(lengths))]
        builder.add_document(torch.tensor(tokens, dtype=torch.int32), lengths)
    builder.finalize(str(folder / "text.idx"))
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder),
            "--data-path", str(folder / "text")]  # fmt: skip


@pytest.fixture(scope="module", params=CHECKOUTS, ids=lambda path: path.name)
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched copy of a checkout."""
    tree = copy_of(request.param, tmp_path_factory.mktemp(request.param.name) / "patched")
    shutil.copytree(request.param / "examples", tree / "examples")
    done = apply(tree)
    assert done.returncode == 0, done.stderr
    return tree


def told(out: Path) -> str:
    return "".join(log.read_text(errors="replace") for log in sorted(out.glob("worker-*.log")))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_nvidias_trains_as_it_does_alone(
    patched: Path, documents: list[str], tmp_path: Path, name: str
) -> None:
    script = SCRIPTS[name]
    if script.masked and importlib.util.find_spec("transformers") is None:
        pytest.skip("NOT TESTED: the tokenizer of masked words needs the package transformers")
    program = [str(patched / script.path), *COMMON, *NO_DROPOUT, *script.flags.split(), *documents * script.masked]
    program += script.split.split()
    launch(patched, 2, tmp_path / "alone", "-m", "recover_megatron.hostdevice", *program)
    ours = ["--recover", "--recover-device", "cpu", "--recover-inject", KILLS]
    said = launch(patched, 4, tmp_path / "ours", *program, *ours)
    assert "worker 3 killed by SIGKILL" in said

    rows = [found.groups() for found in map(LOGGED.search, told(tmp_path / "alone").splitlines()) if found]
    steps = list(read_steps(tmp_path / "ours" / "steps.jsonl"))
    assert (
        [int(number) for number, _, _ in rows] == [step.iteration for step in steps] == list(range(1, ITERATIONS + 1))
    )
    assert [audit_problem(step) for step in steps] == [None] * ITERATIONS
    assert [step.replicas for step in steps] == [2, 2] + [1] * (ITERATIONS - 2)
    losses = [step.loss for step in steps]
    losses[1] = (losses[0] + losses[1]) / 2  # as Megatron logs the second iteration
    assert losses == pytest.approx([float(loss) for _, loss, _ in rows], rel=LOSS)
    assert [step.grad_norm for step in steps] == pytest.approx([float(norm) for _, _, norm in rows], rel=GRAD_NORM,
                                                               abs=0.6e-3)  # fmt: skip
    alone, after = (EVALUATED.findall(told(tmp_path / out)) for out in ("alone", "ours"))
    assert len(alone) == 3
    assert [number for number, _ in after] == [number for number, _ in alone]
    assert [float(loss) for _, loss in after] == pytest.approx([float(loss) for _, loss in alone], rel=LOSS)
