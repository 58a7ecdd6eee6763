"""Hybrid sharding in plain PyTorch that survives kill -9 of its workers: FSDP2 inside a replica, without Megatron.

    recover-run --nproc-per-node 4 examples/hsdp_pytorch.py --shards 2 --iterations 200

Two consecutive workers form a shard group: they share one copy of the model, and their torch.distributed contains only
these two workers, so FSDP2 runs as usual.  recover_megatron's ring sums each shard over the shard groups.  If a worker
dies, the other worker of its shard group exits, too, and the other shard groups finish the iteration.  Every iteration
sums the gradients of the same M microbatches, each exactly once, even if workers die.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from recover_megatron.collectives.column import Column
from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.workload import reassign

M = 24  # microbatches per iteration
WIDTH, BLOCKS = 32, 3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def sharded_model(shards: int) -> torch.nn.Module:
    """Create the model, which is equal in every shard group; this worker holds its shard of every parameter."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[Block() for _ in range(BLOCKS)], torch.nn.Linear(WIDTH, 1)).double()
    mesh = dist.init_device_mesh("cpu", (shards,))
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)  # no division, because each loss is divided by M
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
    return model


class Trainer:
    def __init__(self, column: Column) -> None:
        self.column = column
        self.model = sharded_model(column.shards)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.target = torch.randn(WIDTH, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        self.bucket = Bucket.of_gradients(self.model.parameters(), extra=1 + M)
        self.loss, self.counts = self.bucket.flat[-1 - M], self.bucket.flat[-M:]  # summed with the gradients
        self.iteration = 1
        self.ran: list[int] = []  # in this iteration, by this worker

    def run(self, j: int) -> None:
        """Run microbatch ``j``, while the other workers of the shard group run the adjacent ones; FSDP sums all."""
        samples = torch.Generator().manual_seed(1000 * self.iteration + j)  # equal on all workers
        x = torch.randn(8, WIDTH, dtype=torch.float64, generator=samples)
        loss = (self.model(x) - x @ self.target).square().mean() / M
        loss.backward()
        row = loss.detach()
        dist.all_reduce(row)
        self.loss += row
        first = j - self.column.shard_group.shard
        self.counts[first : first + self.column.shards] += 1
        self.ran.append(j)

    def share(self) -> list[int]:
        """Return this worker's share of the microbatches that no shard group has run in this iteration.

        A shard group gets microbatches in rows of one per worker, because FSDP sums the gradients of a row together.
        """
        column, shards = self.column, self.column.shards
        had: dict[int, set[int]] = {number: set() for number in column.shard_groups}
        for worker, status in column.statuses.items():
            if worker // shards in had and status["iteration"] == self.iteration:
                had[worker // shards].update(status["ran"])
        lost = sorted(set(range(M)).difference(*had.values()))
        load = {number: len(microbatches) for number, microbatches in had.items()}
        shared = reassign(lost, shards, column.shard_groups, load=load)
        return shared[column.shard_group.number][column.shard_group.shard]

    def finish_iteration(self) -> None:
        """Run this worker's missing microbatches, sum the gradients over the shard groups, and agree on the step.

        Raises EpochRevoked if a worker has died.
        """
        group, own = self.column.group([self.bucket]), self.share()
        with self.bucket.save_sums():  # keeps finished sums while microbatches are run again
            for j in own:
                self.run(j)
        group.all_reduce(self.bucket).wait()
        self.column.agree(self.iteration)

    def step(self) -> None:
        assert self.counts.eq(1).all(), f"iteration {self.iteration}: microbatches counted {self.counts.tolist()}"
        self.optimizer.step()  # equal to the bit on all workers of the column
        print(f"iteration {self.iteration} loss {self.loss.item()!r}", flush=True)
        self.bucket.clear()
        self.iteration, self.ran = self.iteration + 1, []

    def train(self, iterations: int) -> None:
        while True:
            # If one worker of the shard group must join a new epoch first, all its workers join.
            if not all_of_us(self.column.opened([self.bucket])):
                self.column.join({"iteration": self.iteration, "ran": self.ran})
            elif self.iteration > iterations:
                return
            else:
                with contextlib.suppress(EpochRevoked):
                    self.finish_iteration()
            if self.column.committed >= self.iteration:  # a join may report the commit, too
                self.step()


def all_of_us(yes: bool) -> bool:
    """Return whether all workers of the shard group pass True."""
    answer = torch.tensor(int(yes))
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


def main(shards: int, iterations: int) -> None:
    column = Column.from_environment(shards=shards)  # raises an error for incomplete shard groups
    group = column.shard_group
    store, _, _ = next(dist.rendezvous("env://"))
    own = dist.PrefixStore(f"shard group {group.number}", store)
    dist.init_process_group("gloo", store=own, rank=group.shard, world_size=shards)
    try:
        Trainer(column).train(iterations)
    except RuntimeError:  # gloo raises it if a peer of the shard group is unreachable
        column.shard_group.end_if_broken()
        raise
    column.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2, help="workers per shard group")
    parser.add_argument("--iterations", type=int, default=200)
    arguments = parser.parse_args()
    main(arguments.shards, arguments.iterations)
