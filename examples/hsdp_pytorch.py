"""Hybrid sharding in plain PyTorch that survives kill -9 of its workers: FSDP2 inside a replica, without Megatron.

    recover-run --nproc-per-node 4 examples/hsdp_pytorch.py --shards 2 --iterations 200

Two consecutive workers form a shard group: they share one copy of the model, and torch.distributed sees only them, so
FSDP2 runs inside a shard group as usual.  Sums over the shard groups, for each shard separately, use this library's
ring.  If a worker dies, its shard group is lost: its other workers exit, too.  The other shard groups finish the
iteration, and every iteration sums the gradients of the same M microbatches, each exactly once, whichever workers die
and whenever.
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
    """Create the same model in every shard group, each worker with its shard of every parameter."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[Block() for _ in range(BLOCKS)], torch.nn.Linear(WIDTH, 1)).double()
    mesh = dist.init_device_mesh("cpu", (shards,))
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)  # a sum: the M losses are divided by M already
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
    return model


class Trainer:
    def __init__(self, column: Column) -> None:
        self.column = column
        self.model = sharded_model(column.shards)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.target = torch.randn(WIDTH, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        self.bucket = Bucket.of_gradients(self.model.parameters(), extra=1 + M)
        self.loss, self.counts = self.bucket.flat[-1 - M], self.bucket.flat[-M:]  # summed as the gradients are
        self.iteration = 1
        self.ran: list[int] = []  # in this iteration, by this worker

    def run(self, j: int) -> None:
        """Add microbatch j, while the shard group's peers add the adjacent ones: FSDP sums them, in shards."""
        samples = torch.Generator().manual_seed(1000 * self.iteration + j)  # the same on any worker
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
        """Return this worker's share of the microbatches that no shard group had when it joined.

        Microbatches are distributed in rows, one per worker of a shard group: FSDP sums a row together.
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
        """Run the missing microbatches, sum them, and agree with all.  Raises EpochRevoked if a worker has died."""
        group, own = self.column.group([self.bucket]), self.share()
        with self.bucket.save_sums():  # keeps the finished sums
            for j in own:
                self.run(j)
        group.all_reduce(self.bucket).wait()
        self.column.agree(self.iteration)

    def step(self) -> None:
        assert self.counts.eq(1).all(), f"iteration {self.iteration} has its microbatches {self.counts.tolist()} times"
        self.optimizer.step()  # with the same bits on every worker of the column
        print(f"iteration {self.iteration} loss {self.loss.item()!r}", flush=True)
        self.bucket.clear()
        self.iteration, self.ran = self.iteration + 1, []

    def train(self, iterations: int) -> None:
        while True:
            # The workers of a shard group act together: they continue only if none of them must join first.
            if not all_of_us(self.column.opened([self.bucket])):
                self.column.join({"iteration": self.iteration, "ran": self.ran})
            elif self.iteration > iterations:
                return
            else:
                with contextlib.suppress(EpochRevoked):
                    self.finish_iteration()
            if self.column.committed >= self.iteration:  # also if only the join has reported it
                self.step()


def all_of_us(yes: bool) -> bool:
    """Return whether all workers of the shard group pass True."""
    answer = torch.tensor(int(yes))
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


def main(shards: int, iterations: int) -> None:
    column = Column.from_environment(shards=shards)  # first: it refuses incomplete shard groups
    group = column.shard_group
    store, _, _ = next(dist.rendezvous("env://"))
    own = dist.PrefixStore(f"shard group {group.number}", store)
    dist.init_process_group("gloo", store=own, rank=group.shard, world_size=shards)
    try:
        Trainer(column).train(iterations)
    except RuntimeError:  # from gloo: a peer of the shard group is unreachable
        column.shard_group.end_if_broken()
        raise
    column.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2, help="workers per shard group")
    parser.add_argument("--iterations", type=int, default=200)
    arguments = parser.parse_args()
    main(arguments.shards, arguments.iterations)
