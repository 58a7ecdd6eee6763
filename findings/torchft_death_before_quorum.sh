#!/usr/bin/env bash
# torchft 0.2.0 with torch 2.15.0: four replicas of one process each, without a GPU, over gloo; one is killed before
#   or after its quorum for a step. Replica r reduces the gradient 10^r with Manager.allreduce (a mean: 37 without the
#   dead).
#
# Guess: the step in which a replica dies does not commit on the others, as torchft says of errors (report_error).
# Seen (the same in torchft-nightly 2026.10.26): that is so where the replica dies after its quorum. Where it dies
#   before it, which is at any time since the last step, the survivors wait for 5 s in their quorum (the lighthouse's
#   timeout of a heartbeat), and commit this very step with the mean of three. No error is raised; nobody runs the
#   dead one's samples.
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
cat >death.py <<'PYTHON'
import multiprocessing
import os
import signal
import subprocess
import sys
from datetime import timedelta
from socket import create_server

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo


def replica(me, port, moment, seen):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=lambda state: None, state_dict=dict,
        min_replica_size=1, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}", hostname="127.0.0.1", replica_id=f"replica{me}",
    )
    steps_of_four = 0
    while steps_of_four <= 3:
        last = steps_of_four == 3
        if me == 3 and last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        manager.start_quorum()
        manager.wait_quorum()
        if me == 3 and last:
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = torch.tensor([10.0**me])
        manager.allreduce(gradient).wait()
        committed = manager.should_commit()
        steps_of_four += last or manager.num_participants() == 4
    seen.put((committed, manager.num_participants(), gradient.item() if committed else None))
    signal.pause()


def main():
    for moment in ("before", "after"):
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.argv[1], "--bind", f"127.0.0.1:{port}", "--min_replicas", "3"]
        lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        spawn = multiprocessing.get_context("spawn")
        seen = spawn.Queue()
        replicas = [spawn.Process(target=replica, args=(me, port, moment, seen)) for me in range(4)]
        for process in replicas:
            process.start()
        for committed, participants, mean in sorted((seen.get() for _ in range(3)), key=str):
            print(f"{moment} its quorum: committed {committed}, participants {participants}, mean {mean}", flush=True)
        for process in replicas:
            process.kill()
            process.join()
        lighthouse.kill()
        lighthouse.wait()


if __name__ == "__main__":
    main()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore death.py "$folder/venv/bin/torchft_lighthouse" >out 2>errors
cat out
test "$(grep -cx 'before its quorum: committed True, participants 3, mean 37.0' out)" = 3
test "$(grep -cx 'after its quorum: committed False, participants 4, mean None' out)" = 3
