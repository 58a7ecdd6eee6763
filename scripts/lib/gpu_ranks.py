"""Several ranks on one GPU, which NCCL treats as separate hosts; they die, are revoked and are replaced.

    the parent, which is the membership  --("open" | "sum" | ..., its arguments)-->  pipe  a rank: a separate process
                                         <--a dict; with "told": the final answer--

NCCL refuses two ranks of one host on one device; so each process has a different NCCL_HOSTID, and they communicate over
sockets of the loopback interface.  The gradient of worker w in round r is ``pattern * (w + 1) + r``, small integers:
every sum is exact.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.process
import os
import queue
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from lib.gpu_training import ALONE, Failed, Place

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import cancel_token_of, open_group
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.nccl.resources import open_native
from tests.doubles.epoch import PlainEpoch
from tests.doubles.nccl import library as nccl_double

ELEMENTS, BUCKETS, PATTERN = 1 << 20, 4, 97
PATIENCE, STARTING, FIRES, COUNTING = 60.0, 180.0, 3.0, 20.0
"""Seconds: limits for an answer of a rank, for its start, for an independent kernel; duration of the kills."""
SECRET = b"of ranks that only this machine reaches"
Values = dict[str, Any]


class Rank:
    """State of a rank: the group of its epoch, and objects that outlive it.  Public methods are commands."""

    def __init__(self, me: int, port: int, pipe: Connection, device: torch.device) -> None:
        self._me, self._pipe, self._device = me, pipe, device
        self._store = dist.TCPStore("127.0.0.1", port, None, False)
        self._cuda = libraries.load().cuda
        self._keeper = Keeper()
        self._epoch = PlainEpoch(0, [me], me)
        self._revoked_at = math.inf
        self._group: Group
        self._opened = ExitStack()
        self._buckets = [Bucket(torch.zeros(ELEMENTS, device=device)) for _ in range(BUCKETS)]
        self._pattern = torch.arange(ELEMENTS, device=device).remainder_(PATTERN).to(torch.float32)
        self._round = 0
        self._members_of: dict[int, list[int]] = {}

    def open(self) -> Values:
        """Open the group of the epoch, with the communicators of the last epoch if they can be reused."""
        self._opened.close()
        started = time.monotonic()
        group: Any = open_group(
            self._epoch, self._store, name="checks", secret=SECRET, device=self._device, timeout=PATIENCE,
            collective="native", communicators=self._keeper,
        )  # fmt: skip
        self._group = self._opened.enter_context(closing(group))
        communicator = group._backend._comm.identity
        return {"seconds": time.monotonic() - started, "communicator": communicator, "round": self._round}

    def sum(self, rounds: int) -> Values:
        """Sum the buckets repeatedly; notify the parent before each round."""
        fastest = PATIENCE
        for _ in range(rounds):
            self._fill(self._round + 1)
            self._pipe.send({"round": self._round})
            started = time.monotonic()
            self._sum()
            fastest = min(fastest, time.monotonic() - started)
        return {"rate": sum(bucket.flat.nbytes for bucket in self._buckets) / fastest / 1e9}

    def recover(self, round: int) -> Values:
        """Finish the interrupted round; a worker that did not take part in it adds its own gradient."""
        if self._round != round:
            self._fill(round)
        self._group.pull(self._buckets)
        self._sum()
        return {}

    def queue(self) -> Values:
        """Use a communicator on both members; then, on member 0 alone, enqueue one operation and another behind it."""
        epoch = PlainEpoch(1, [0, 1], self._me)
        token = cancel_token_of(epoch)
        backend = open_native(self._me, 2, self._store, token, Keeper(), "queue", self._device, PATIENCE)
        whole, part = (torch.zeros(ELEMENTS // parts, device=self._device) for parts in (1, 2))
        operations = {
            "one": lambda: backend.reduce_scatter(part, whole),
            "two": lambda: backend.all_gather(whole, part),
        }
        with backend.scope():
            for enqueue in operations.values():
                backend.wait(enqueue())
        told: Values = {}
        for name, enqueue in operations.items() if self._me == 0 else ():
            stalled, fired = self._cuda.Event(), self._cuda.Event()
            with backend.scope():
                enqueue()
                stalled.record()
            self._pattern.add_(0)  # a kernel that is loaded already: loading may wait for the device
            fired.record(self._cuda.current_stream(self._device))
            until = time.monotonic() + FIRES
            while not fired.query() and time.monotonic() < until:
                time.sleep(0.001)
            told[name] = fired.query()
            if stalled.query():
                raise RuntimeError("an operation finished although one of its members had not started it")
        if told:
            told["heard"] = self._heard(stalled)
            epoch.revoke("the other member does not start it")
            backend.quiesce()
            backend.close()
        return told

    def _heard(self, stalled: Any) -> float:
        """Return the seconds until a revocation ends the sum of a bucket whose gradient waits for a blocked kernel."""
        self._cuda.current_stream(self._device).wait_event(stalled)
        self._buckets[0].ledger.clear()
        handle = self._group.all_reduce(self._buckets[0])
        time.sleep(0.1)  # by now the group's thread waits for the bucket; there is no signal for it
        revoked = time.monotonic()
        self._epoch.revoke("while a bucket is computed")
        try:
            handle.wait(10.0)
        except EpochRevoked:
            return time.monotonic() - revoked
        except TimeoutError:
            raise RuntimeError("a revocation does not end the wait for a bucket: a death in backward hangs") from None
        raise RuntimeError("a bucket was summed before it was computed")

    def _fill(self, round: int) -> None:
        self._round = round
        for bucket in self._buckets:
            bucket.ledger.clear()
            torch.mul(self._pattern, self._me + 1, out=bucket.flat)
            bucket.flat.add_(round)

    def _sum(self) -> None:
        for handle in [self._group.all_reduce(bucket) for bucket in self._buckets]:
            handle.wait(PATIENCE)
        self._check(complete=True)

    def _check(self, complete: bool = False) -> None:
        """Raise RuntimeError unless every element is this worker's gradient, or the sum over the ledger's epoch."""
        for bucket in self._buckets:
            if complete and not bucket.ledger.complete:
                raise RuntimeError("a bucket is not complete after its sum")
            local = [(span, [self._me]) for span in bucket.ledger.local]
            for span, members in [*local, *((span, self._members_of[span.epoch]) for span in bucket.ledger.reduced)]:
                expected = self._pattern[span.start : span.stop] * sum(worker + 1 for worker in members)
                expected += self._round * len(members)
                if wrong := int((bucket.flat[span.start : span.stop] != expected).sum()):
                    raise RuntimeError(f"{wrong} elements are wrong in {span}, members {members}")

    def serve(self) -> None:
        """Run commands until killed: ``revoke`` at once, in the reading thread, all others sequentially."""
        commands: queue.SimpleQueue[tuple[str, Values]] = queue.SimpleQueue()

        def read() -> None:
            while True:
                what, values = self._pipe.recv()
                if what == "revoke":
                    self._revoked_at = time.monotonic()
                    self._epoch.revoke("the parent revokes")
                    continue
                if what == "open":
                    number, self._members_of = values.pop("number"), values.pop("epochs")
                    self._epoch, self._revoked_at = PlainEpoch(number, self._members_of[number], self._me), math.inf
                commands.put((what, values))

        threading.Thread(target=read, daemon=True).start()
        self._pipe.send({"told": "start"})
        while True:
            what, values = commands.get()
            try:
                answer = getattr(self, what)(**values)
            except EpochRevoked:
                after = max(0.0, time.monotonic() - self._revoked_at)  # NCCL may have reported the death earlier
                answer = {"raised": "EpochRevoked", "after": after}
                self._check()
            except (RuntimeError, TimeoutError, OSError) as error:
                answer = {"raised": f"{type(error).__name__}: {str(error)[:200]}"}
            self._pipe.send({"told": what, **answer})


def run_rank(me: int, port: int, pipe: Connection, environment: dict[str, str], place: Place) -> None:
    """Run the process of a rank, with standard error appended to ranks.log in the folder of ``place``."""
    os.dup2(os.open(place.folder / "ranks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ |= ALONE | {"NCCL_HOSTID": f"rank{me}"} | environment
    if place.rehearse:
        double = nccl_double()
        libraries.load = lambda: double  # type: ignore[assignment]
    else:
        torch.cuda.set_device(0)
    Rank(me, port, pipe, torch.device("cpu" if place.rehearse else "cuda", 0)).serve()


class Ranks:
    """Processes of all ranks, and the members of the current epoch; ``spares``: number of processes started ahead."""

    def __init__(self, place: Place, spares: int = 0, **environment: str) -> None:
        place.needs("nccl")
        self._place, self._spares, self._environment = place, spares, environment
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._started: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._ready = 0
        self._epochs: dict[int, list[int]] = {}
        self.members: list[int] = []

    def ready(self, count: int) -> list[int]:
        """Return the next ``count`` ranks, once they have initialized the device."""
        first, self._ready = self._ready, self._ready + count
        for me in range(len(self._started), self._ready + self._spares):
            own, other = multiprocessing.Pipe()
            args = me, self._store.port, other, self._environment, self._place
            process = multiprocessing.get_context("spawn").Process(target=run_rank, args=args, daemon=True)
            process.start()
            other.close()
            self._started.append((process, own))
        for me in range(first, self._ready):
            self.result(me, "start", patience=STARTING)
        return list(range(first, self._ready))

    def kill(self, me: int) -> None:
        self._started[me][0].kill()
        self._started[me][0].join()

    def close(self) -> None:
        for me in range(len(self._started)):
            self.kill(me)

    def ask(self, me: int, what: str, **values: Any) -> None:
        """Send a command; if the rank has exited, ``answer`` reports it."""
        with suppress(BrokenPipeError):
            self._started[me][1].send((what, values))

    def answer(self, me: int, what: str, patience: float = PATIENCE) -> Values:
        """Return the next message of a rank."""
        pipe = self._started[me][1]
        if not pipe.poll(max(0.0, self._place.until(patience) - time.monotonic())):
            raise Failed(f"rank {me} did not answer in time: {what}")
        with suppress(EOFError, ConnectionResetError):
            return dict(pipe.recv())
        raise Failed(f"rank {me} exited unexpectedly: {what}")

    def result(self, me: int, what: str, raised: str | None = None, patience: float = PATIENCE) -> Values:
        """Return the final answer to a command, after its progress messages; raise Failed unless it is as expected."""
        while "told" not in (values := self.answer(me, what, patience)):
            pass
        if values.get("raised") != raised:
            raise Failed(f"rank {me}, {what}: {values.get('raised', 'finished without an error')}")
        return values

    def all(self, what: str, **values: Any) -> list[Values]:
        """Run a command on every member."""
        for me in self.members:
            self.ask(me, what, **values)
        return [self.result(me, what) for me in self.members]

    def open(self, members: list[int]) -> list[Values]:
        """Begin the next epoch; each member opens its group."""
        self.members = self._epochs[len(self._epochs) + 1] = members
        return self.all("open", number=len(self._epochs), epochs=self._epochs)


def one_queue(place: Place) -> str:
    """Check which kernels wait for a sum that does not end, with one hardware queue, and that a revocation ends it."""
    with closing(Ranks(place, CUDA_DEVICE_MAX_CONNECTIONS="1")) as ranks:
        ranks.open(ranks.ready(2))
        ranks.all("sum", rounds=1)
        told = ranks.all("queue")[0]
    if not told["one"]:
        raise Failed("a kernel waits even for one unfinished sum: tensor parallelism during sums may hang here")
    if told["heard"] > place.soon:
        raise Failed(f"a revocation took {told['heard']:.1f} s to end the wait for a bucket that is being computed")
    behind = "two behind each other: these queues are independent" if told["two"] else "wait behind two"
    heard = f"a revocation ends the wait for a bucket within {1e3 * told['heard']:.0f} ms"
    return f"kernels pass one unfinished sum of ours, and {behind}; {heard}"


def two(place: Place) -> str:
    """Check two ranks: sums are exact, and the communicator of one epoch is reused in the next."""
    with closing(Ranks(place)) as ranks:
        opened = ranks.open(ranks.ready(2))
        summed = ranks.all("sum", rounds=20)
        kept = ranks.open(ranks.members)
        ranks.all("sum", rounds=1)
    if {values["communicator"] for values in kept} != {opened[0]["communicator"]}:
        raise Failed("a new communicator was opened although the first one could be reused")
    first, next_ = (1e3 * max(values["seconds"] for values in each) for each in (opened, kept))
    version = "double" if place.rehearse else ".".join(map(str, libraries.load().version))
    return f"NCCL {version}; {summed[0]['rate']:.2f} GB/s; opened in {first:.0f} ms, kept in {next_:.0f} ms"


def kills(place: Place) -> str:
    """Kill ranks in the middle of sums, repeatedly, and replace them: no element may ever be wrong."""
    choose = random.Random(2026)
    raised, recovered, until = list[float](), list[float](), 0.0
    with closing(Ranks(place, spares=1 if place.rehearse else 6)) as ranks:
        ranks.open(ranks.ready(4))
        while len(recovered) < 100 and (not recovered or time.monotonic() < until):
            until = until or time.monotonic() + COUNTING
            for me in ranks.members:
                ranks.ask(me, "sum", rounds=1_000_000)
            for me in ranks.members * choose.randrange(1, 4):
                if "round" not in (values := ranks.answer(me, "sums begin")):
                    raise Failed(f"rank {me} ended its sums unexpectedly: {values}")
            victim = choose.choice(ranks.members)
            time.sleep(choose.random() * 0.05)  # anywhere within a sum
            ranks.kill(victim)
            for me in (survivors := [me for me in ranks.members if me != victim]):
                ranks.ask(me, "revoke")
            raised += [ranks.result(me, "sums during a death", "EpochRevoked")["after"] for me in survivors]
            newcomers, started = ranks.ready(1), time.monotonic()
            rounds = [values["round"] for values in ranks.open([*survivors, *newcomers])]
            ranks.all("recover", round=max(rounds))
            recovered.append(time.monotonic() - started)
    if max(raised) > place.soon:
        raise Failed(f"a rank left its sums only {max(raised):.1f} s after the revocation")
    return f"{len(recovered)} killed; to EpochRevoked {_spread(raised)}; to the next full sum {_spread(recovered)}"


def _spread(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} ms (at most {1e3 * max(seconds):.0f})"
