"""torchtitan's trainer with steps that survive kill -9 of workers: an adapter, and the command to start it.

    recover-run --elastic --max-restarts 2 --nproc-per-node 8 examples/torchtitan_trainer.py --job.config_file FILE

For torchtitan before 0.3, whose steps are not divided by their number of valid tokens.

Each worker is a torchtitan of one process which holds the whole model (no FSDP, TP or PP), with the global batch as
its gradient accumulation; the library shares the microbatches out.  Two methods of ``Trainer`` are replaced:
``batch_generator``, since microbatches are asked for by their number, and ``train_step``, where the step is finished.
"""

import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torchtitan.train import Trainer

from recover_megatron import ElasticDataParallel

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Numbered:
    """The batches of a data loader by their number, of which a worker takes some."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.next = 0
        """The number of the batch that the data loader gives next: above 0 where it went on from a checkpoint."""
        self._kept: dict[int, Batch] = {}

    def get(self, number: int, since: int) -> Batch:
        """Number ``number``; those from ``since`` on may be asked for again."""
        self._kept = {kept: batch for kept, batch in self._kept.items() if kept >= since}
        while self.next <= number:
            batch = next(self._batches)
            if self.next >= since:
                self._kept[self.next] = batch
            self.next += 1
        return self._kept[number]


class ElasticTrainer(Trainer):
    """A trainer whose steps are those of ``ElasticDataParallel``."""

    elastic: ElasticDataParallel | None = None

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Any:
        """Those of torchtitan, by their number."""
        return Numbered(iter(super().batch_generator(data_iterable)))

    def train_step(self, data_iterator: Any) -> None:
        """A step that is finished whoever dies in it."""
        if self.elastic is None:
            self.elastic = self._begin()
            data_iterator.next = self.elastic.completed * self.gradient_accumulation_steps
        count = self.gradient_accumulation_steps

        def microbatch(step: int, j: int) -> torch.Tensor:
            first = (step - 1) * count
            loss: torch.Tensor = self.forward_backward_step(*data_iterator.get(first + j, first))
            return loss.detach() * count  # it was divided, and has gone back already

        done = self.elastic.step(microbatch)
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(self.step, done.loss, done.loss, float(self.grad_norm))

    def _begin(self) -> ElasticDataParallel:
        elastic = ElasticDataParallel(
            self.model_parts[0],
            self.optimizers,
            microbatches=self.gradient_accumulation_steps,
            state={"lr_schedulers": self.lr_schedulers, "trainer": self},
            before_update=self._clip,
            backward=lambda loss: None,
        )
        elastic.completed = self.step - 1  # what the checkpoint had
        return elastic

    def _clip(self) -> None:
        parameters = self.model_parts[0].parameters()
        self.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.job_config.training.max_norm, foreach=True)


def be_one_process() -> None:
    """torch.distributed is to see this process alone: the others are found by recover-run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def main() -> None:
    from torchtitan.config import ConfigManager

    be_one_process()
    trainer = ElasticTrainer(ConfigManager().parse_args())
    trainer.train()
    if trainer.elastic is not None:
        trainer.elastic.leave()
    trainer.close()


if __name__ == "__main__":
    main()
