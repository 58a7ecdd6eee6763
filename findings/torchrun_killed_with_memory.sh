#!/usr/bin/env bash
# torch 2.15.0: torchrun with two workers, of which one kills itself by SIGKILL, without memory worth mentioning and
#   with 3 GiB resident (private, pages of 4 KiB). The other one notes when their TCP connection is closed, and when
#   torchrun's SIGTERM reaches it. --monitor-interval is 0.01 s (default: 0.1 s), so that torchrun's own polling
#   counts for little.
#
# Guess: SIGKILL closes a process's connections at once, and torchrun acts at its next poll, whatever the process
#   holds.
# Seen (on two busy cores): without memory the connection is closed after 1 to 9 ms, and torchrun has acted after 4 to
#   56 ms; with 3 GiB both take 0.3 to 1.1 s. Linux takes a killed process's memory apart before it closes its files,
#   and its parent hears of its end after both: peers, gloo's errors and torchrun are late by the GiB. Only the ratio is
#   checked.
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
cat >worker.py <<'PYTHON'
import mmap
import os
import signal
import socket
import sys
import time

gib, port = int(sys.argv[1]), int(sys.argv[2])
if os.environ["RANK"] == "0":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it waits until it is asked for
    peer, _ = socket.create_server(("127.0.0.1", port)).accept()
    killed = float(peer.recv(100))
    assert peer.recv(1) == b""
    closed = time.monotonic() - killed
    signal.sigwait({signal.SIGTERM})
    print(f"{gib} {closed:.4f} {time.monotonic() - killed:.4f}", flush=True)
else:
    if gib:
        held = mmap.mmap(-1, gib << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    peer.send(str(time.monotonic()).encode())
    os.kill(os.getpid(), signal.SIGKILL)
PYTHON
port=$("$folder/venv/bin/python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
for _ in 1 2 3 4 5; do
    for gib in 0 3; do
        "$folder/venv/bin/torchrun" --standalone --monitor-interval 0.01 --nproc-per-node 2 worker.py "$gib" "$port" \
            2>errors || true
    done
done >out
"$folder/venv/bin/python" - <<'PYTHON'
from statistics import median

rows = [line.split() for line in open("out")]
assert len(rows) == 10, rows
for place, name in ((1, "the connection is closed"), (2, "torchrun has acted")):
    small, large = (median(float(row[place]) for row in rows if row[0] == gib) for gib in ("0", "3"))
    print(f"{name}: {small:.4f} s after the kill, with 3 GiB {large:.4f} s, {large / small:.0f} times as long")
    assert large > 5 * small
PYTHON
