"""One rank of gpu_ranks: a process of its own on the GPU that all share, told what to do in lines of JSON.

    gpu_ranks.py  --{"do": "open" | "sum" | ...}-->  stdin    this process
                  <--{"told": ...}----------------  stdout

``revoke`` is obeyed at once, by the thread that reads; all else by the main thread, one after the other.  The gradient
of worker w in round r is ``pattern * (w + 1) + r``, of small whole numbers, so every sum is exact and everybody can
compute it: an element of a bucket is right only if it is the worker's own gradient or the sum over the members of the
epoch that its ledger names.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Bucket, Span
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.ring.executor import Tuning

REHEARSE = os.environ.get("RECOVER_REHEARSE") == "1"
DEVICE = torch.device("cpu") if REHEARSE else torch.device("cuda", 0)
SECRET = b"of these checks alone, and of no use elsewhere"
SECONDS = 60.0
PATTERN = 97

Values = dict[str, Any]


if REHEARSE:
    from tests.doubles.nccl import library as nccl_double

    _double = nccl_double()
    libraries.load = lambda: _double  # type: ignore[assignment]


class ToldEpoch:
    """An epoch that ends when the parent says so."""

    def __init__(self, number: int, members: Sequence[int], me: int) -> None:
        self.number, self.members, self.me = number, list(members), me
        self.revoked_at = 0.0
        self._callbacks: list[Callable[[str], None]] = []
        self._lock = threading.Lock()

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            if not self.revoked_at:
                self._callbacks.append(callback)
                return
        callback("revoked before the group was opened")

    def revoke(self) -> None:
        """From any thread."""
        with self._lock:
            self.revoked_at = self.revoked_at or time.monotonic()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback("the parent revokes")


class Rank:
    """What this process holds: the group of its epoch, and the buckets that outlive it."""

    def __init__(self, me: int, store: dist.Store) -> None:
        self._me = me
        self._store = store
        self.epoch: ToldEpoch | None = None
        self._group: Group | None = None
        self._buckets: list[Bucket] = []
        self._round = 0
        self._members_of: dict[int, list[int]] = {}

    # ---- what the parent asks for; each returns what is told

    def open(self, collective: str, segment_bytes: int = 0) -> Values:
        """Open the group of ``self.epoch``, which the reading thread has made."""
        assert self.epoch is not None
        if self._group is not None:
            self._group.close()
            self._group = None
        started = time.monotonic()
        tuning = Tuning(segment_bytes=segment_bytes, least_bytes=segment_bytes) if segment_bytes else None
        self._group = open_group(
            self.epoch, self._store, name="checks", secret=SECRET, device=DEVICE, timeout=SECONDS,
            collective=collective, transport_kind="nccl", tuning=tuning,
        )  # type: ignore[arg-type]  # fmt: skip
        return {"seconds": time.monotonic() - started}

    def sum(self, buckets: int, elements: int, rounds: int) -> Values:
        """Sum ``buckets`` buckets, again and again; a line before each round, so that the parent knows when."""
        self._need_buckets(buckets, elements)
        seconds = []
        for _number in range(rounds):
            self._round += 1
            self._fill()
            tell({"round": self._round})
            started = time.monotonic()
            self._sum()
            seconds.append(time.monotonic() - started)
        return {"seconds": min(seconds), "bytes": sum(bucket.flat.nbytes for bucket in self._buckets)}

    def recover(self, buckets: int, elements: int, round: int) -> Values:
        """After ``open``: finish the round that was interrupted; a worker that was not in it brings its own part."""
        started = time.monotonic()
        fresh = not self._buckets
        self._need_buckets(buckets, elements)
        if fresh or self._round != round:
            self._round = round
            self._fill()
        assert self._group is not None
        self._group.pull(self._buckets)
        self._sum()
        return {"seconds": time.monotonic() - started}

    def state(self) -> Values:
        """What this process holds, and where its buckets are."""
        folder = Path("/proc/self")
        held = {"threads": len(os.listdir(folder / "task")), "descriptors": len(os.listdir(folder / "fd"))}
        if not REHEARSE:
            free, total = torch.cuda.mem_get_info(DEVICE)
            held |= {"device_used": total - free, "allocated": torch.cuda.memory_allocated(DEVICE)}
        return held | {"round": self._round, "buckets": bool(self._buckets)}

    def peak(self, buckets: int, elements: int) -> Values:
        """Bytes that the group takes at most beside ``buckets`` buckets which are handed in back to back."""
        self._need_buckets(buckets, elements)
        self._round += 1
        self._fill()
        if REHEARSE:
            self._sum()
            return {"bucket": self._buckets[0].flat.nbytes}
        torch.cuda.synchronize(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        self._sum(check=False)
        peak = torch.cuda.max_memory_allocated(DEVICE) - before
        self.check()
        return {"peak": peak, "bucket": self._buckets[0].flat.nbytes}

    def busy(self, seconds: float) -> Values:
        """Matrix products on the default stream in a thread of their own, as a backward pass beside the sums."""
        if not REHEARSE:
            threading.Thread(target=_multiply, args=(seconds,), daemon=True).start()
        return {}

    def fill_memory(self, share: float) -> Values:
        """Take so much of what is free on the device, then set finished sums aside: that needs memory."""
        filler = []
        if not REHEARSE:
            free, _total = torch.cuda.mem_get_info(DEVICE)
            filler.append(torch.empty(int(free * share), dtype=torch.uint8, device=DEVICE))
        sums = [bucket.flat.clone() if REHEARSE else bucket.flat.cpu() for bucket in self._buckets]
        asides = [bucket.set_aside() for bucket in self._buckets]
        for bucket in self._buckets:
            bucket.flat.zero_()
        for aside in asides:
            aside.put_back()
        if not all(bool((b.flat.cpu() == s).all()) for b, s in zip(self._buckets, sums, strict=True)):
            raise RuntimeError("a sum that was set aside came back changed")
        return {"filled": sum(tensor.nbytes for tensor in filler)}

    # ---- inside

    def begin(self, number: int, epochs: dict[str, list[int]]) -> None:
        """The epoch ``number``, and the members of all so far; from the reading thread: a revocation may follow."""
        members = epochs[str(number)]
        self._members_of = {int(epoch): ids for epoch, ids in epochs.items()}
        self.epoch = ToldEpoch(number, members, self._me)

    def _need_buckets(self, count: int, elements: int) -> None:
        if [bucket.flat.numel() for bucket in self._buckets] != [elements] * count:
            self._buckets = [Bucket(torch.zeros(elements, device=DEVICE)) for _ in range(count)]
            self._pattern = torch.arange(elements, device=DEVICE).remainder_(PATTERN).to(torch.float32)

    def _fill(self) -> None:
        for bucket in self._buckets:
            bucket.ledger.clear()
            torch.mul(self._pattern, self._me + 1, out=bucket.flat)
            bucket.flat.add_(self._round)

    def _sum(self, check: bool = True) -> None:
        assert self._group is not None
        for handle in [self._group.all_reduce(bucket) for bucket in self._buckets]:
            handle.wait(SECONDS)
        if check:
            self.check()
        if not all(bucket.ledger.complete for bucket in self._buckets):
            raise RuntimeError("a bucket is not complete after its sum")

    def check(self) -> None:
        """Raises RuntimeError unless every element is this worker's gradient or the sum that its ledger names."""
        for number, bucket in enumerate(self._buckets):
            parts: list[tuple[Span, list[int]]] = [(span, [self._me]) for span in bucket.ledger.local]
            parts += [(span, self._members_of[span.epoch]) for span in bucket.ledger.reduced]
            for span, members in parts:
                expected = self._pattern[span.start : span.stop] * sum(worker + 1 for worker in members)
                expected += self._round * len(members)
                wrong = int((bucket.flat[span.start : span.stop] != expected).sum())
                if wrong:
                    raise RuntimeError(f"{wrong} elements of bucket {number} are wrong in {span}, members {members}")


def _multiply(seconds: float) -> None:
    matrix = torch.ones(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.current_stream(DEVICE).synchronize()


def tell(values: Values) -> None:
    """One line for the parent."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def carry_out(rank: Rank, command: Values) -> Values:
    """The answer to one command; what it raised is an answer, too."""
    what = command.pop("do")
    started = time.monotonic()
    try:
        return {"told": what, **getattr(rank, what)(**command)}
    except EpochRevoked:
        now = time.monotonic()
        rank.check()
        assert rank.epoch is not None
        by_parent = rank.epoch.revoked_at
        return {"told": what, "raised": "EpochRevoked", "after": now - by_parent if by_parent else None}
    except (RuntimeError, TimeoutError, OSError) as error:
        lines = str(error).splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0][:200]}"
        return {"told": what, "failed": text, "seconds": time.monotonic() - started}


def main() -> None:
    """``gpu_rank.py ME PORT``: the parent's store listens at that port of this host."""
    me, port = int(sys.argv[1]), int(sys.argv[2])
    rank = Rank(me, dist.TCPStore("127.0.0.1", port, None, False))
    if not REHEARSE:
        torch.cuda.set_device(DEVICE)
        torch.ones(1, device=DEVICE).sum().item()
    commands: queue.SimpleQueue[Values | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "revoke":
                if rank.epoch is not None:
                    rank.epoch.revoke()
                continue
            if command["do"] == "open":
                rank.begin(command.pop("number"), command.pop("epochs"))
            commands.put(command)
        commands.put(None)

    threading.Thread(target=read, daemon=True).start()
    tell({"told": "ready"})
    while (command := commands.get()) is not None:
        tell(carry_out(rank, command))
    os._exit(0)  # what a death has left in NCCL may keep an orderly end waiting


if __name__ == "__main__":
    main()
