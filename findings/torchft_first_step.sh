#!/usr/bin/env bash
# torchft 0.2.0 with torch 2.15.0: the first two steps of four replicas of one process each, without a GPU, over gloo.
#   All four are in the first quorum; replica r reduces the gradient 10^r with Manager.allreduce (a mean: 277.75 of
#   all four).
#
# Guess: the first step's gradient is the mean of all four, as in every other step; or it is that of the one replica
#   whose weights the others take in this step.
# Seen (the same in torchft-nightly 2026.10.26): it is a quarter of that one's gradient, and the step commits on all
#   four. The other three put zeros in the sum (is_participating() is false on them), and the sum is divided by
#   num_participants(), which is 4; batches_committed() grows by 4. With init_sync=False or use_async_quorum=False it
#   is the mean of all four.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" torchft==0.2.0 torch==2.15.0 || exit 2

cd "$folder"
cat >first.py <<'PYTHON'
import multiprocessing
import subprocess
import sys
from socket import create_server

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo


def replica(me, port, settings, together, seen):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=4, rank=0,
        world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=f"http://127.0.0.1:{port}",
        hostname="127.0.0.1", replica_id=f"replica{me}", **settings,
    )
    for _ in range(2):
        manager.start_quorum()
        gradient = torch.tensor([10.0**me])
        manager.allreduce(gradient).wait()
        takes_part = manager.is_participating()
        committed = manager.should_commit()
        seen.put((gradient.item(), committed, takes_part, manager.num_participants(), manager.batches_committed()))
        together.wait()
    seen.close()
    seen.join_thread()
    manager.shutdown()


def main():
    for settings in ({}, {"init_sync": False}, {"use_async_quorum": False}):
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.argv[1], "--bind", f"127.0.0.1:{port}", "--min_replicas", "4"]
        lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        spawn = multiprocessing.get_context("spawn")
        together, seen = spawn.Barrier(5), spawn.Queue()
        replicas = [spawn.Process(target=replica, args=(me, port, settings, together, seen)) for me in range(4)]
        for process in replicas:
            process.start()
        for step in range(2):
            told = [seen.get() for _ in replicas]
            means = sorted({mean for mean, *_ in told})
            print(
                f"{settings or 'defaults'}, step {step}: mean {means}, committed by {sum(row[1] for row in told)},",
                f"is_participating on {sum(row[2] for row in told)}, num_participants {told[0][3]},",
                f"batches_committed {told[0][4]}", flush=True,
            )
            together.wait()
        for process in replicas:
            process.join()
        lighthouse.kill()
        lighthouse.wait()


if __name__ == "__main__":
    main()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore first.py "$folder/venv/bin/torchft_lighthouse" >out 2>errors
cat out
all='is_participating on 4, num_participants 4, batches_committed'
one='\[(0.25|2.5|25.0|250.0)\], committed by 4, is_participating on 1, num_participants 4, batches_committed 4'
grep -qxE "defaults, step 0: mean $one" out
grep -qx "defaults, step 1: mean \[277.75\], committed by 4, $all 8" out
for setting in init_sync use_async_quorum; do
    grep -qx "{'$setting': False}, step 0: mean \[277.75\], committed by 4, $all 4" out
done
