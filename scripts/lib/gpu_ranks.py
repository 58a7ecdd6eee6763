"""Several ranks on one GPU: NCCL takes them for hosts of their own, and they die, are revoked and are replaced.

NCCL refuses two ranks of one host on one device; a host is what NCCL_HOSTID says, so each process has its own, and
they talk over sockets of the loopback interface.  That is the transport that reports errors soonest; P2P and NVLink,
which report none, need several GPUs.

    python scripts/lib/gpu_ranks.py WHAT      prints a line: what was counted and measured; RECOVER_REHEARSE=1: on CPU

The parent is the membership: it ends epochs and says who is in the next one.
"""

from __future__ import annotations

import json
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

REHEARSE = os.environ.get("RECOVER_REHEARSE") == "1"
TELL = float(os.environ.get("RECOVER_CHECK_SECONDS", "60"))
"""Seconds that a check which counts goes on; it is over before when it has counted to MOST."""
MOST = 200
PATIENCE = 60.0
"""Seconds in which a rank must answer; a hang is a failure that names the rank and what it was asked."""
STARTING = 180.0
"""Seconds in which it must have imported torch and made its CUDA context, beside others that do the same."""
SPARES = 1 if REHEARSE else 6
"""Ranks that have begun to start before they are needed, where some are killed."""
MIB = 1 << 20
Values = dict[str, Any]


class RankFailed(SystemExit):
    """What a rank answered, or did not, that must not be; the text ends this process with status 1."""


class Process:
    """One rank."""

    def __init__(self, me: int, port: int) -> None:
        self.me = me
        alone = {"NCCL_HOSTID": f"rank{me}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}
        command = [sys.executable, str(Path(__file__).with_name("gpu_rank.py")), str(me), str(port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | alone, text=True, bufsize=1
        )
        self._told: queue.SimpleQueue[Values | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._told.put(json.loads(line))
        self._told.put(None)

    def ask(self, do: str, **values: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RankFailed(f"rank {self.me} has ended by itself, status {self._process.wait()}") from None

    def answer(self, what: str, patience: float = PATIENCE) -> Values:
        """The next line of it."""
        try:
            values = self._told.get(timeout=patience)
        except queue.Empty:
            raise RankFailed(f"rank {self.me} did not answer within {patience:g} s: {what}") from None
        if values is None:
            raise RankFailed(f"rank {self.me} has ended by itself, status {self._process.wait()}: {what}")
        return values

    def result(self, what: str, patience: float = PATIENCE) -> Values:
        """The answer to a command, behind the lines that are on the way to it."""
        while "told" not in (values := self.answer(what, patience)):
            pass
        return values

    def good(self, what: str, patience: float = PATIENCE) -> Values:
        """As ``result``; raises RankFailed unless the command was carried out."""
        values = self.result(what, patience)
        if "failed" in values or "raised" in values:
            raise RankFailed(f"rank {self.me}, {what}: {values.get('failed') or values['raised']}")
        return values

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self._process.kill()
        self._process.wait()


class Ranks:
    """All of them, some waiting for their first epoch; a context."""

    def __init__(
        self, collective: str, *, elements: int = MIB, buckets: int = 4, segment_bytes: int = 0, spares: int = 0
    ) -> None:
        self.shape = {"buckets": buckets, "elements": elements}
        self._way = {"collective": collective, "segment_bytes": segment_bytes}
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._started: list[Process] = []
        self._spares = spares
        self._waiting: list[Process] = []
        self._epochs: dict[int, list[int]] = {}
        self.members: list[Process] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()

    def ready(self, count: int) -> list[Process]:
        """``count`` ranks that have the device; the next ones have begun."""
        first = len(self._started)
        more = count + self._spares - len(self._waiting)
        self._started += [Process(me, self._store.port) for me in range(first, first + more)]
        self._waiting += self._started[first:]
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        for process in taken:
            process.good("start", STARTING)
        return taken

    def open(self, members: Sequence[Process]) -> list[Values]:
        """The next epoch; each opens its group."""
        self.begin(members)
        return [process.good("open") for process in self.members]

    def begin(self, members: Sequence[Process]) -> None:
        """As ``open`` without waiting."""
        self.members = sorted(members, key=lambda process: process.me)
        number = len(self._epochs) + 1
        self._epochs[number] = [process.me for process in self.members]
        for process in self.members:
            process.ask("open", number=number, epochs=self._epochs, **self._way)

    def all(self, do: str, **values: Any) -> list[Values]:
        """Every member carries it out."""
        for process in self.members:
            process.ask(do, **values)
        return [process.good(do) for process in self.members]

    def kill(self, victim: Process) -> list[Process]:
        """The members that are left."""
        victim.kill()
        return [process for process in self.members if process is not victim]

    def revoke(self, survivors: Sequence[Process], what: str) -> list[float]:
        """End the epoch; every survivor must raise EpochRevoked with nothing but its gradients and exact sums.

        Returns the seconds after which each did.
        """
        for process in survivors:
            process.ask("revoke")
        told = [process.result(what) for process in survivors]
        for process, values in zip(survivors, told, strict=True):
            if values.get("raised") != "EpochRevoked":
                raise RankFailed(f"rank {process.me}, {what}: {values}, not EpochRevoked")
        return [max(0.0, values["after"] or 0.0) for values in told]

    def recover(self, members: Sequence[Process]) -> float:
        """The next epoch finishes the interrupted round; the seconds of the slowest, opening included."""
        started = time.monotonic()
        self.open(members)
        states = [values["round"] for values in self.all("state")]
        self.all("recover", **self.shape, round=max(states))
        return time.monotonic() - started


# ---- the checks --------------------------------------------------------------------------------------------------


def two(collective: str) -> str:
    """Two ranks, any result at all."""
    with Ranks(collective) as ranks:
        opened = ranks.open(ranks.ready(2))
        summed = ranks.all("sum", **ranks.shape, rounds=20)
        rate = summed[0]["bytes"] / summed[0]["seconds"] / 1e9
        return f"opened in {max(values['seconds'] for values in opened):.2f} s, {rate:.2f} GB/s"


def kills(collective: str, delay: float = 0.0, most: int = MOST) -> str:
    """Killed in the middle of sums, again and again, each replaced: never a wrong element."""
    choose = random.Random(2026)
    raised: list[float] = []
    recovered: list[float] = []
    with Ranks(collective, spares=SPARES) as ranks:
        ranks.open(ranks.ready(4))
        before = ranks.all("state")
        for _ in _until_counted(raised, most):
            _start_sums(ranks, choose)
            victim = choose.choice(ranks.members[1:])  # the first one stays, so that growth shows in it
            time.sleep(choose.random() * 0.05)  # anywhere within a sum
            survivors = ranks.kill(victim)
            time.sleep(delay)  # the news is late: until then nobody may believe what NCCL makes of the death
            raised += ranks.revoke(survivors, "sums beside a death")
            recovered.append(ranks.recover([*survivors, *ranks.ready(1)]))
        after = ranks.all("state")
        grown = {key: after[0][key] - before[0][key] for key in ("threads", "descriptors")}
        if max(grown.values()) > len(recovered) and len(recovered) >= 20:
            raise RankFailed(f"the first rank has grown by {grown} over {len(recovered)} deaths")
        return (
            f"{len(recovered)} killed; to EpochRevoked {_spread(raised)}; to the next whole sum {_spread(recovered)}; "
            f"grown by {grown['threads']} threads, {grown['descriptors']} descriptors"
        )


def revocations(collective: str) -> str:
    """Nobody dies, and the epoch ends at full speed: nothing but EpochRevoked, within a second."""
    choose = random.Random(2027)
    raised: list[float] = []
    recovered: list[float] = []
    with Ranks(collective) as ranks:
        ranks.open(ranks.ready(3))
        for _ in _until_counted(recovered):
            _start_sums(ranks, choose)
            time.sleep(choose.random() * 0.02)
            raised += ranks.revoke(ranks.members, "revoked at full speed")
            recovered.append(ranks.recover(ranks.members))
    if max(raised) > 1.0:
        raise RankFailed(f"{max(raised):.1f} s until EpochRevoked was raised")
    return f"{len(recovered)} revocations; to EpochRevoked {_spread(raised)}"


def deaths_while_opening(collective: str) -> str:
    """A member dies between the meeting and the first message."""
    choose = random.Random(2028)
    waited: list[float] = []
    with Ranks(collective, spares=SPARES) as ranks:
        opening = max(values["seconds"] for values in ranks.open(ranks.ready(3)))
        ranks.all("sum", **ranks.shape, rounds=1)
        for _ in _until_counted(waited):
            ranks.begin(ranks.members)
            time.sleep(choose.random() * opening)
            survivors = ranks.kill(choose.choice(ranks.members))
            started = time.monotonic()
            for process in survivors:
                process.ask("revoke")
            for process in survivors:
                values = process.result("opening beside a death")
                if "failed" in values:
                    raise RankFailed(f"rank {process.me} while opening: {values['failed']}")
            waited.append(time.monotonic() - started)
            ranks.recover([*survivors, *ranks.ready(1)])
    return f"{len(waited)} killed; the others free after {_spread(waited)}"


def segments(collective: str) -> str:
    """The ring's cost of a segment, and its rate for longer ones, alone and beside matrix products."""
    parts = []
    for size, beside in ((4 << 10, False), (512 << 10, False), (4 * MIB, False), (32 * MIB, False), (32 * MIB, True)):
        elements = (MIB if size < MIB else 32 * MIB) // (16 if REHEARSE else 1)
        with Ranks(collective, elements=elements, buckets=2, segment_bytes=size) as ranks:
            ranks.open(ranks.ready(2))
            if beside:
                ranks.all("busy", seconds=20)
            values = ranks.all("sum", **ranks.shape, rounds=3)[0]
            name = f"{size >> 10} KiB" + (" beside matrix products" if beside else "")
            parts.append(f"{name} {values['bytes'] / values['seconds'] / 1e9:.2f} GB/s")
    return ", ".join(parts)


def peak_memory(collective: str) -> str:
    """Thirty buckets back to back: scratch is bounded."""
    with Ranks(collective, elements=MIB // 16 if REHEARSE else 16 * MIB, buckets=30) as ranks:
        ranks.open(ranks.ready(2))
        ranks.all("sum", **ranks.shape, rounds=1)
        values = ranks.all("peak", **ranks.shape)[0]
        if REHEARSE:
            return "no device memory in a rehearsal"
        ratio = values["peak"] / values["bucket"]
        if collective == "native" and ratio > 4.0:  # pack, output, gathered: of two buckets under way, chunks apart
            raise RankFailed(f"scratch of {ratio:.1f} buckets")
        return f"scratch of {ratio:.2f} buckets"


def full_memory(collective: str) -> str:
    """Finished sums are set aside although the device is full."""
    with Ranks(collective, elements=(1 if REHEARSE else 64) * MIB) as ranks:
        ranks.open(ranks.ready(2))
        ranks.all("sum", **ranks.shape, rounds=1)
        first = ranks.members[0]
        first.ask("fill_memory", share=0.9999)
        return f"{first.good('fill_memory')['filled'] / (1 << 30):.1f} GiB taken before"


def _start_sums(ranks: Ranks, choose: random.Random) -> None:
    """Have every member sum without end, and wait until some rounds have begun."""
    for process in ranks.members:
        process.ask("sum", **ranks.shape, rounds=1_000_000)
    for _ in range(choose.randrange(1, 4)):
        for process in ranks.members:
            if "round" not in process.answer("sums begin"):
                raise RankFailed(f"rank {process.me} has ended its sums by itself")


def _until_counted(counted: Sequence[float], most: int = MOST) -> Iterator[None]:
    """Goes on until ``most`` are counted, for ``TELL`` seconds; once at least."""
    until = time.monotonic() + TELL
    while len(counted) < most and (time.monotonic() < until or not counted):
        yield


def _spread(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} ms (at most {1e3 * max(seconds):.0f})"


CHECKS: dict[str, Callable[[], str]] = {}
for _way in ("native", "ring"):
    CHECKS |= {
        f"two-{_way}": partial(two, _way),
        f"kills-{_way}": partial(kills, _way),
        f"late-{_way}": partial(kills, _way, delay=5.0, most=3),
        f"revoked-{_way}": partial(revocations, _way),
        f"opening-{_way}": partial(deaths_while_opening, _way),
    }
CHECKS |= {
    "segments": partial(segments, "ring"),
    "peak": partial(peak_memory, "native"),
    "full": partial(full_memory, "native"),
}

if __name__ == "__main__":
    print(CHECKS[sys.argv[1]](), flush=True)
