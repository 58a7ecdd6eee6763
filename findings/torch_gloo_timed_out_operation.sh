#!/usr/bin/env bash
# torch 2.15.0: Work.wait(timeout) of an all_reduce and of an irecv over gloo, whose peer comes later than the timeout,
#   on two processes without a GPU.
#
# Guess: wait() raises, and the operation is over with it: the tensor is the caller's again.  What follows for the group
#   is the same for both, since both say that they have timed out.
# Seen: the two have nothing in common but the message.  The all_reduce goes on: when the peer comes, its call returns
#   as if nothing had been, and what the caller has written into its tensor meanwhile is summed, sent to the peer, and
#   replaced by the sum.  The group is whole.  After the irecv every later operation of the group raises, at both ends,
#   and the tensor stays as it was.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" torch==2.15.0 || exit 2

cd "$folder"
"$folder/venv/bin/python" -W ignore - >out 2>err <<'PYTHON' || { tail err; exit 1; }
import os
from datetime import timedelta

import torch
import torch.distributed as dist

child = os.fork()
rank = int(child == 0)
store = dist.FileStore("store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def raised(call):
    """Say whether ``call`` raises or returns."""
    try:
        call()
    except RuntimeError:
        return "raises"
    return "returns"


# An all_reduce that times out; the caller then uses its tensor for something else.
mine = torch.ones(1)
if rank == 0:
    work = dist.all_reduce(mine, async_op=True)
    print("rank 0's all_reduce:", raised(lambda: work.wait(timedelta(seconds=1))), flush=True)
    mine.fill_(100)
    store.set("late", "")
    store.wait(["there"])
    work.wait()
    print("rank 0's tensor, in which it has put 100 since:", mine.item(), flush=True)
else:
    store.wait(["late"])
    how = raised(lambda: dist.all_reduce(mine))
    print(f"rank 1's all_reduce {how}:", mine.item(), flush=True)
    store.set("there", "")
again = torch.ones(1)
dist.all_reduce(again)
if rank == 0:
    print("the next all_reduce:", again.item(), flush=True)
dist.barrier()

# An irecv that times out.
got = torch.full((1,), -1.0)
if rank == 0:
    work = dist.irecv(got, 1)
    print("rank 0's irecv:", raised(lambda: work.wait(timedelta(seconds=1))), flush=True)
    store.set("late message", "")
    store.wait(["sent"])
    print("rank 0's tensor:", got.item(), flush=True)
    print("rank 0's next all_reduce:", raised(lambda: dist.all_reduce(again)), flush=True)
    store.set("tried", "")
    store.wait(["tried too"])
else:
    store.wait(["late message"])
    print("rank 1's send:", raised(lambda: dist.send(again, 0)), flush=True)
    store.set("sent", "")
    store.wait(["tried"])
    print("rank 1's next all_reduce:", raised(lambda: dist.all_reduce(again)), flush=True)
    store.set("tried too", "")
if child:
    os.waitpid(child, 0)
os._exit(0)
PYTHON
cat out
grep -qx "rank 0's all_reduce: raises" out
grep -qx "rank 1's all_reduce returns: 101.0" out
grep -qx "rank 0's tensor, in which it has put 100 since: 101.0" out
grep -qx 'the next all_reduce: 2.0' out
grep -qx "rank 0's irecv: raises" out
grep -qx "rank 0's tensor: -1.0" out
grep -qx "rank 0's next all_reduce: raises" out
grep -qx "rank 1's send: raises" out
grep -qx "rank 1's next all_reduce: raises" out
