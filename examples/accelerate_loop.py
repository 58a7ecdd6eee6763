"""Training loop with Hugging Face's accelerate that survives kill -9 of its workers.

    recover-run --elastic --max-restarts 2 --nproc-per-node 4 examples/accelerate_loop.py

A loop with accelerate needs four changes.  accelerate must see a single process, because recover-run connects the
workers.  Batches are selected by number.  recover_megatron calls ``zero_grad``, ``backward`` and ``optimizer.step``.
``Accelerator`` keeps its default ``gradient_accumulation_steps=1``, since recover_megatron divides by the number of
batches.
"""

import os
import sys

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402

from recover_megatron import ElasticDataParallel, run  # noqa: E402

BATCHES = 8  # per optimizer step
torch.manual_seed(1)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
model, optimizer = accelerator.prepare(model, optimizer)
data = torch.randn(4096, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def microbatch(step: int, j: int) -> torch.Tensor:
    """Return the loss of batch ``j`` of ``step``, which has the same rows of the data on any worker."""
    first = ((step - 1) * BATCHES + j) * 8 % len(data)
    batch = data[first : first + 8].to(accelerator.device)
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def main(steps: int) -> None:
    elastic = ElasticDataParallel(
        model,
        optimizer,
        microbatches=BATCHES,
        state={"scheduler": scheduler},
        backward=accelerator.backward,
        before_update=lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
    )
    for done in run(elastic, microbatch, steps):
        scheduler.step()
        print(f"iteration {done.step} loss {done.loss!r}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
