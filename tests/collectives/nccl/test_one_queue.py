"""Sums beside a model, on devices with one hardware queue: a host that runs ahead, and buckets that are computed late.

Ranks are threads with a device each: two replicas of two, which also have collectives inside (``TensorParallel``).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from recover_megatron.collectives.device import DeviceStuck, until, within
from recover_megatron.collectives.epoch import CancelToken, EpochRevoked
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.instep.faults import is_of_device
from tests.collectives.together import DEADLINE, SECRET, Dictionary, PlainEpoch
from tests.doubles.nccl import library as nccl_double
from tests.doubles.nccl import streams
from tests.doubles.nccl.model import TensorParallel
from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.harness.waiting import eventually

STUCK = patient(5)
"""Seconds after which nothing comes any more."""


class Worker:
    """One of column ``column``; ``number``: of its device, and in the run."""

    def __init__(self, number: int, members: list[int], store: Dictionary) -> None:
        self.number = number
        self.device = torch.device("cpu", number)
        self.compute = streams.current_stream(self.device)
        self.epoch = PlainEpoch(1, members, number)
        self.group = open_group(
            self.epoch, store, name=f"column {number % 2}", secret=SECRET, timeout=DEADLINE,
            collective="native", device=self.device,
        )  # fmt: skip
        self.gate = threading.Event()
        """The model's kernel that waits for it is over."""

    def sum_one(self) -> Callable[[], None]:
        """Hand a bucket in; what waits for its sum, and looks at it."""
        bucket = Bucket(torch.full((100,), float(self.number)))
        handle = self.group.all_reduce(bucket)

        def summed() -> None:
            handle.wait(STUCK)
            assert bucket.flat.tolist() == [float(sum(self.group.members))] * 100

        return summed

    def end(self) -> None:
        self.gate.set()
        self.epoch.revoke("the test is over")
        self.group.close()


class Looks:
    """At which events the host looked and found them not over, since ``forget``: by device and kind of stream."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._seen: set[tuple[streams.Device, bool]] = set()

    def at(self, stream: streams.Stream) -> None:
        with self.changed:
            self._seen.add((stream.device, stream is stream.device.default))
            self.changed.notify_all()

    def await_one(self, worker: Worker, *, at_compute: bool) -> None:
        """Return when the worker's sums wait for what computes, or for what they have launched themselves."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.seen(worker, at_compute=at_compute), STUCK)

    def seen(self, worker: Worker, *, at_compute: bool) -> bool:
        return (worker.compute.device, at_compute) in self._seen

    def forget(self) -> None:
        self._seen.clear()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, connections: int) -> Looks:
    """New devices, whose events tell who waits."""
    its = Looks()

    class Event(streams.Event):
        def query(self) -> bool:
            if not self.over and self._stream is not None:
                its.at(self._stream)
            return super().query()

        def synchronize(self) -> None:
            self.query()
            super().synchronize()

    double = nccl_double()
    monkeypatch.setattr(streams, "Event", Event)
    monkeypatch.setattr(streams, "_devices", {})
    monkeypatch.setattr(libraries, "load", lambda: double)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(connections))
    return its


@pytest.fixture
def workers(looks: Looks) -> Iterator[list[Worker]]:
    """Replica 0 are the first two; each has summed a bucket: the first operation connects, and waits for the others."""
    store, columns = Dictionary(), [[0, 2], [1, 3]]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda number: Worker(number, columns[number % 2], store), range(4)))
        try:
            list(pool.map(lambda worker: worker.sum_one()(), made))
            looks.forget()
            yield made
        finally:
            list(pool.map(Worker.end, made))


@pytest.mark.parametrize("connections", [1, 8])
def test_a_host_that_runs_ahead_of_its_device_holds_up_no_sum(workers: list[Worker], looks: Looks) -> None:
    """Of each replica one worker's bucket is computed before the model's next collective is launched, that of its mate
    after; another one in the other replica."""
    core = libraries.load().core
    replicas = [core.get_unique_id() for _ in range(2)]

    def train(worker: Worker) -> None:
        inside = TensorParallel(libraries.load(), replicas[worker.number // 2], worker.number % 2, 2, worker.device)
        inside.launch()  # connects
        early = worker.number in (0, 3)
        try:
            if early:
                worker.gate.set()
            worker.compute.submit(worker.gate.wait)
            summed = worker.sum_one()
            if early:
                looks.await_one(worker, at_compute=False)
            inside.launch()
            worker.compute.submit(lambda: None)
            worker.gate.set()
            summed()
            worker.compute.synchronize()
        finally:
            worker.epoch.revoke("this worker has come to its end")
            inside.abort()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, workers))


@pytest.mark.parametrize("connections", [8])
def test_a_sum_waits_for_the_gradients_that_the_device_still_computes(workers: list[Worker], looks: Looks) -> None:
    """A sum that does not wait for the stream that computes reads what was in the bucket before."""
    buckets = [Bucket(torch.full((100,), torch.nan)) for _ in workers]

    def compute(worker: Worker, bucket: Bucket) -> None:
        worker.gate.wait()
        bucket.flat.fill_(worker.number)

    for worker, bucket in zip(workers, buckets, strict=True):
        worker.compute.submit(partial(compute, worker, bucket))
    handles = [worker.group.all_reduce(bucket) for worker, bucket in zip(workers, buckets, strict=True)]
    eventually(lambda: all(looks.seen(worker, at_compute=True) for worker in workers) or handles[0].done())
    for worker in workers:
        worker.gate.set()
    for worker, bucket, handle in zip(workers, buckets, handles, strict=True):
        handle.wait(STUCK)
        assert bucket.flat.tolist() == [float(sum(worker.group.members))] * 100


@pytest.mark.parametrize("connections", [1])
def test_a_revocation_reaches_who_waits_for_a_bucket_that_is_never_computed(
    workers: list[Worker], looks: Looks
) -> None:
    for worker in workers:
        worker.compute.submit(worker.gate.wait)
    handles = [worker.group.all_reduce(Bucket(torch.ones(100))) for worker in workers]
    for worker in workers:
        looks.await_one(worker, at_compute=True)
        worker.epoch.revoke("somebody has died")
    for handle in handles:
        with pytest.raises(EpochRevoked):
            handle.wait(patient(1))


def test_one_place_of_the_product_waits_for_a_device() -> None:
    waiting = {
        path.name
        for path in (REPOSITORY / "recover_megatron").rglob("*.py")
        if re.search(r"\.synchronize\(", path.read_text())
    }
    assert not waiting, "a wait of CUDA's hears of no revocation: collectives.device.until"


def test_a_device_that_does_not_finish_its_own_copies_after_the_switch_is_a_broken_one() -> None:
    token = CancelToken(1)
    check = within(0.0, since=token)
    check()
    token.cancel("the epoch is over")
    with pytest.raises(DeviceStuck) as stuck:
        until(SimpleNamespace(query=lambda: False), check)
    assert is_of_device(stuck.value)
