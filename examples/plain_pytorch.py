"""Data-parallel training in plain PyTorch that survives kill -9 of its workers: no Megatron, no torch.distributed.

    recover-run --nproc-per-node 4 examples/plain_pytorch.py --iterations 200

Every iteration sums the gradients of the same M microbatches, each exactly once, whichever workers die and whenever.
The survivors finish the iteration in which a worker died: what was summed already stands (it contains the dead worker's
share), what was not is summed again after the lost microbatches were run by others.
"""

import argparse
import os

import torch

from recover_megatron.collectives.bucket import Bucket
from recover_megatron.collectives.epoch import SessionEpoch
from recover_megatron.collectives.errors import EpochRevoked
from recover_megatron.collectives.opening import open_group
from recover_megatron.membership.auth import SECRET_VARIABLE
from recover_megatron.membership.worker import connect

M, ME = 16, int(os.environ["RANK"])
torch.manual_seed(1)  # the same model everywhere
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
target = torch.randn(32, 1, dtype=torch.float64)


def new_bucket() -> Bucket:
    """Room for a gradient and the loss, all of it LOCAL."""
    return Bucket(torch.zeros(sum(p.numel() for p in model.parameters()) + 1, dtype=torch.float64))


def gradient(iteration: int, j: int) -> torch.Tensor:
    """Microbatch (iteration, j): the same samples whoever runs it.  Returns its gradient and, last, its loss."""
    x = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * iteration + j))
    loss = (model(x) - x @ target).square().mean() / M
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([*(g.reshape(-1) for g in grads), loss.detach().reshape(1)])


def step(bucket: Bucket, iteration: int) -> None:
    """The committed update: the same bits on every worker."""
    at = 0
    for p in model.parameters():
        p.grad = bucket.flat[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    optimizer.step()
    print(f"iteration {iteration} loss {bucket.flat[-1].item()!r}", flush=True)


def main(iterations: int) -> None:
    session, secret = connect(), os.environ[SECRET_VARIABLE].encode()
    store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    iteration, group = 1, None
    bucket, mine, ran = new_bucket(), set[int](), set[int]()
    while iteration <= iterations:
        try:
            if group is None:  # a new epoch: everybody tells which microbatches of which iteration it runs
                plan = session.join({"iteration": iteration, "mine": sorted(mine)})
                members = sorted(plan.members)
                if plan.committed >= iteration:  # decided before the last epoch ended
                    step(bucket, iteration)
                    iteration, bucket, mine, ran = iteration + 1, new_bucket(), set(), set()
                statuses = [status for status in plan.data["statuses"].values() if status["iteration"] == iteration]
                lost = sorted(set(range(M)).difference(*(status["mine"] for status in statuses)))
                mine |= set(lost[members.index(ME) :: len(members)])
                group = open_group(SessionEpoch(session, plan, ME), store, name="dp", secret=secret)
                group.pull([bucket])  # what was finished anywhere is final
            for j in sorted(mine - ran):
                aside = bucket.set_aside()
                bucket.flat += gradient(iteration, j)
                aside.put_back()
                ran.add(j)
            group.all_reduce(bucket).wait()
            session.agree(iteration)
        except EpochRevoked:
            if group is not None:
                group.close()
            group = None
            continue
        step(bucket, iteration)
        iteration, bucket, ran = iteration + 1, new_bucket(), set()
        mine = set(range(M)[members.index(ME) :: len(members)])
    session.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    main(parser.parse_args().iterations)
