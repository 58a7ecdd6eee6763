"""A worker's children under signals that are meant for the job, and at the worker's end."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recover_megatron.megatron_hooks import data
from recover_megatron.megatron_hooks.microbatches import InOrder
from tests.harness.waiting import DEADLINE

PROGRAM = """
import multiprocessing, os, signal, sys
from multiprocessing import resource_tracker

from recover_megatron.megatron_hooks import children

def echo(pipe, number):
    signal.signal(number, lambda *_: None)  # as Megatron has its loaders do
    while True:
        pipe.send((pipe.recv(), number in signal.pthread_sigmask(signal.SIG_BLOCK, [])))

def main(number):
    children.install()
    heard = []
    signal.signal(number, lambda *_: heard.append(1))
    if number == signal.SIGUSR1:  # else it is started with the first process that needs it
        resource_tracker.ensure_running()
    started = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        mine, its = context.Pipe()
        context.Process(target=echo, args=(its, number), daemon=True).start()
        mine.send("up")
        assert mine.recv() == ("up", True), method
        started[method] = mine, context.Manager().Queue()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    tracker = resource_tracker._resource_tracker._pid
    os.killpg(0, number)
    assert heard == [1]
    for mine, queue in started.values():
        mine.send("here")
        assert mine.recv() == ("here", True)
        queue.put("told")
        assert queue.get() == "told"
    assert os.waitpid(tracker, os.WNOHANG) == (0, 0)
    print("all are left", flush=True)

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_what_a_worker_handles_ends_none_of_its_children_and_they_end_with_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script), str(int(number))],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        start_new_session=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("all are left\n", 0), done.stderr


def deaf(_: int) -> None:
    """As Megatron has its loaders be."""
    signal.signal(signal.SIGTERM, lambda *_: None)


def test_loaders_end_with_the_training_whoever_still_refers_to_them() -> None:
    samples = data.TaggedDataset([{"n": torch.tensor(n)} for n in range(8)])
    loader = torch.utils.data.DataLoader(
        samples, batch_size=2, num_workers=2, persistent_workers=True, worker_init_fn=deaf
    )
    source = data.Source(loader, 2, 0, InOrder(8, 2))
    source.begin(0, [0, 1], 2)
    assert source.get(1)["n"].tolist() == [2, 3]
    assert len(multiprocessing.active_children()) == 2
    data.finish()
    assert multiprocessing.active_children() == []
