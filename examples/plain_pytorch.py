"""Data-parallel training in plain PyTorch that survives kill -9 of its workers: no Megatron, no torch.distributed.

    recover-run --elastic --max-restarts 2 --nproc-per-node 4 examples/plain_pytorch.py

Every step sums the gradients of the same 16 microbatches, each exactly once, even if workers die.  A worker that
replaces a lost worker receives parameters and optimizer state from the workers that train.
"""

import argparse
import os

import torch

from recover_megatron import ElasticDataParallel, run

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
target = torch.randn(32, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def microbatch(step: int, j: int) -> torch.Tensor:
    """Return the loss of microbatch ``j`` of ``step``, which has the same samples on any worker."""
    x = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + j))
    return (model(x) - x @ target).square().mean()


def main(iterations: int, checkpoint: str | None) -> None:
    elastic = ElasticDataParallel(model, optimizer, microbatches=16)
    if checkpoint and os.path.exists(checkpoint):
        elastic.load_state_dict(torch.load(checkpoint))

    def save() -> None:
        new = f"{checkpoint}.{elastic.worker}"  # one file per worker, because an evicted worker may still write
        torch.save(elastic.state_dict(), new)
        elastic.check()  # raises an error if this worker was evicted during the save
        os.rename(new, str(checkpoint))

    for done in run(elastic, microbatch, iterations):
        print(f"iteration {done.step} loss {done.loss!r}", flush=True)
        if checkpoint and (done.step % 50 == 0 or done.step == iterations):
            elastic.lead(save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--checkpoint", metavar="FILE", help="continue from FILE, and write it every 50 steps")
    main(**vars(parser.parse_args()))
