"""Adapter that makes the steps of torchtitan's trainer survive kill -9 of workers.

    recover-run --elastic --max-restarts 2 --nproc-per-node 8 examples/torchtitan_trainer.py \\
        --module llama3 --config llama3_debugmodel

For torchtitan 0.3.0.  Each worker runs torchtitan as a single process with the complete model (no FSDP, TP, PP or EP),
and with gradient accumulation over the global batch; recover_megatron distributes the microbatches over the workers.
Two methods of ``Trainer`` are replaced: ``batch_generator``, since microbatches are selected by number, and
``train_step``, which runs a step of recover_megatron.  The leading worker writes checkpoints; all workers read them.
"""

import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torchtitan.distributed.fsdp as titan_fsdp
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from recover_megatron import ElasticDataParallel, StepResult, run

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Steps:
    """Reader of a data loader that keeps the ``count`` batches of the current step."""

    def __init__(self, batches: Iterator[Batch], count: int) -> None:
        self._batches, self._count = batches, count
        self.read = 0
        """Last step whose batches were read; initially the checkpoint's step, or 0."""
        self._now: list[Batch] = []

    def of(self, step: int) -> list[Batch]:
        """Return the batches of ``step``; the batches of steps in between are read and dropped.

        ``step`` must not be less than in an earlier call.
        """
        while self.read < step:
            self._now = [next(self._batches) for _ in range(self._count)]
            self.read += 1
        return self._now


class ElasticTrainer(Trainer):
    """torchtitan's trainer with the steps of ``ElasticDataParallel``."""

    steps: Iterator[StepResult] = iter(())
    ntokens_seen: int

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Any:
        """Return a reader of torchtitan's batches by step, and begin the elastic run."""
        self.data = Steps(iter(super().batch_generator(data_iterable)), self.gradient_accumulation_steps)
        self.steps = self._begin()
        return self.data

    def train_step(self, data_iterator: Any) -> None:
        """Run one step, which is finished even if workers die."""
        done = next(self.steps)
        rates = self.lr_schedulers.get_metrics()
        self.lr_schedulers.step()
        self.ntokens_seen += sum(labels.numel() for _, labels in self.data.of(done.step))
        if self.metrics_processor.should_log(self.step):
            more = {"n_tokens_seen": self.ntokens_seen, **rates}
            self.metrics_processor.log(self.step, done.loss, done.loss, float(self.grad_norm), extra_metrics=more)

    def _begin(self) -> Iterator[StepResult]:
        elastic = ElasticDataParallel(
            self.model_parts[0],
            self.optimizers,
            microbatches=self.gradient_accumulation_steps,
            state={"lr_schedulers": self.lr_schedulers, "trainer": self},
            before_update=self._clip,
            backward=lambda loss: None,
        )
        elastic.completed = self.data.read = self.step  # number of steps in the loaded checkpoint
        save = self.checkpointer.save
        self.checkpointer.save = lambda *of, **how: elastic.lead(lambda: save(*of, **how), "checkpoint")
        return run(elastic, self._microbatch, self.config.training.steps)

    def _microbatch(self, step: int, j: int) -> torch.Tensor:
        """Run forward and backward of microbatch ``j``, with its loss divided by the valid tokens of the step."""
        batches = self.data.of(step)
        valid = sum((labels != IGNORE_INDEX).sum() for _, labels in batches)
        inputs, labels = batches[j]
        tokens, dtype = self.ntokens_seen, TORCH_DTYPE_MAP[self.config.training.mixed_precision_param]
        with torch.autocast(self.device.type, dtype, enabled=dtype == torch.bfloat16):  # FSDP would do this
            loss = self.forward_backward_step(
                input_dict={name: value.to(self.device) for name, value in inputs.items()},
                labels=labels.to(self.device),
                global_valid_tokens=torch.as_tensor(valid, device=self.device),
            )
        self.ntokens_seen = tokens  # train_step counts the tokens of all workers when the step is finished
        return loss.detach() * self.gradient_accumulation_steps  # recover_megatron will divide the loss by this number

    def _clip(self) -> None:
        parameters = list(self.model_parts[0].parameters())
        self.grad_norm = dist_utils.clip_grad_norm_(parameters, self.config.training.max_norm, foreach=True)
        self.checkpointer.maybe_wait_for_staging()


def be_one_process() -> None:
    """Configure torch.distributed for this single process, and disable torchtitan's sharding.

    recover-run connects the workers.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    titan_fsdp.fully_shard = lambda module, **how: module


def main() -> None:
    from torchtitan.config import ConfigManager

    be_one_process()
    trainer = ElasticTrainer(ConfigManager().parse_args())
    trainer.train()
    next(trainer.steps, None)  # no step is left, so this call makes the worker leave the run
    trainer.close()


if __name__ == "__main__":
    main()
