"""Data-parallel training in plain PyTorch that survives kill -9 of its workers: no Megatron, no torch.distributed.

    recover-run --nproc-per-node 4 examples/plain_pytorch.py --iterations 200

Every iteration sums the gradients of the same M microbatches, each exactly once, whichever workers die and whenever.
The survivors finish the iteration in which a worker died: what was summed already stands (it contains the dead worker's
share), what was not is summed again after the lost microbatches were run by others.
"""

import argparse
import contextlib

import torch

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.collectives.elastic import ElasticDataParallel
from recover_megatron.collectives.errors import EpochRevoked
from recover_megatron.workload import reassign

M = 16
torch.manual_seed(1)  # the same model everywhere
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
target = torch.randn(32, 1, dtype=torch.float64)
bucket = Bucket.of_gradients(model.parameters(), extra=1)  # and the loss, as its last element


def run(iteration: int, j: int) -> None:
    """Add microbatch (iteration, j) to the bucket: the same samples whoever runs it."""
    x = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * iteration + j))
    loss = (model(x) - x @ target).square().mean() / M
    loss.backward()
    bucket.flat[-1] += loss.detach()


def share(column: ElasticDataParallel, iteration: int) -> list[int]:
    """What this worker runs of what the members did not have when they joined: nobody has a new iteration's."""
    had = {w: status["ran"] for w, status in column.statuses.items() if status["iteration"] == iteration}
    lost = sorted(set(range(M)).difference(*had.values()))
    load = {w: len(microbatches) for w, microbatches in had.items()}
    return reassign(lost, 1, column.members, load=load)[column.me][0]


def main(iterations: int) -> None:
    column = ElasticDataParallel.from_environment()
    for iteration in range(1, iterations + 1):
        bucket.clear()
        ran: list[int] = []
        while column.committed < iteration:
            with contextlib.suppress(EpochRevoked):  # somebody died: join those that are left, with what is there
                if column.over:
                    column.join({"iteration": iteration, "ran": ran})
                    continue  # it may be known now that all had finished the iteration before the death
                group = column.group([bucket])  # what is finished anywhere is final: here, too, from now on
                for j in share(column, iteration):
                    with bucket.set_aside():  # what is finished stays as it is
                        run(iteration, j)
                    ran.append(j)
                group.all_reduce(bucket).wait()
                column.agree(iteration)
        optimizer.step()  # with the same bits on every worker
        print(f"iteration {iteration} loss {bucket.flat[-1].item()!r}", flush=True)
    column.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    main(parser.parse_args().iterations)
