"""Lease that decides which of two halves of a run continues: files on shared storage, each written once.

    PATH.1   {"term", "epoch", "members"}   the first side that continued without workers that may be running
    PATH.2   ...                            the next side: it has a member of the first side, and no lower term

The last file names the holder. The lease never expires. A claim gets it only if the claim's term is not lower than the
holder's, and a member of the holder is a member of the claim's rendezvous, too (``may_take``). So a left-out worker
stays out. No process that was stopped for any time, or has a wrong clock, can take the lease back.

Each later epoch with newcomers takes the lease again (``is_due``), since these newcomers may be the only survivors.

A file is written under a draft name and gets its name by ``link``, which succeeds on only one of all hosts: NFS,
Lustre, GPFS and local file systems promise that, without locks. PATH must be used by this run only.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from recover_megatron.membership.events import AskForLease, Verdict
from recover_megatron.membership.records import from_runs, to_runs

RETRY_SECONDS = 0.5
"""Seconds between two attempts to take the lease while the storage fails."""
_MOST_HOLDERS = 10_000


def may_take(holder: AskForLease | None, claim: AskForLease) -> bool:
    """Return whether the lease may pass from ``holder`` (None: there was none) to ``claim``.

    A worker that is in both has joined under both terms, and a worker only ever follows a higher term. So this worker
    follows the claim's coordinator now, and the holder cannot commit anything without this worker.
    """
    return holder is None or (claim.term >= holder.term and bool(claim.members & holder.members))


def is_due(holder: AskForLease | None, claim: AskForLease) -> bool:
    """Return whether the claim must take the lease.

    The claim of a formed epoch (``renew``) need not take it if there is no holder, or if the claim has no new member.
    """
    return not claim.renew or (holder is not None and not claim.members <= holder.members)


def publish(path: Path, content: str) -> bool:
    """Write a file with this content unless the name exists. Return whether it was written. Raises OSError."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(descriptor, content.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)
    return True


class Lease:
    """Asks for the lease in a separate thread, since storage may hang; the thread calls ``report`` with the answers."""

    def __init__(self, path: Path, report: Callable[[Verdict], None]) -> None:
        self._path = path
        self._report = report
        self._claim: AskForLease | None = None
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: new claim; False: closed
        threading.Thread(target=self._run, name="recover-lease", daemon=True).start()

    def ask(self, claim: AskForLease) -> None:
        """Start attempts to take the lease, which continue until the storage answers. An earlier claim is dropped."""
        self._claim = claim
        self._asked.put(True)

    def forget(self) -> None:
        """Stop trying to take the lease. The current attempt may still succeed."""
        self._claim = None

    def close(self) -> None:
        """Stop the thread as soon as the storage has answered."""
        self._claim = None
        self._asked.put(False)

    def _run(self) -> None:
        while self._asked.get():
            while (claim := self._claim) is not None:
                verdict = self._try(claim)
                self._report(verdict)
                if verdict.granted is not None:
                    break
                try:
                    if not self._asked.get(timeout=RETRY_SECONDS):
                        return
                except queue.Empty:
                    continue

    def _try(self, claim: AskForLease) -> Verdict:
        try:
            return self.attempt(claim)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{self._path}: {error.strerror if isinstance(error, OSError) else f'unreadable ({error})'}"
            return Verdict(claim.term, claim.epoch, None, reason)

    def attempt(self, claim: AskForLease) -> Verdict:
        """Take the lease if the rules allow it. Return the verdict.

        Raises OSError if the storage fails, ValueError, KeyError or TypeError if a file is unreadable.
        """
        holder, number = None, 1
        for _ in range(_MOST_HOLDERS):
            place = self._path.with_name(f"{self._path.name}.{number}")
            try:
                record = json.loads(place.read_text())
            except FileNotFoundError:
                record = None
            if record is not None:
                holder = AskForLease(int(record["term"]), int(record["epoch"]), from_runs(record["members"]))
                number += 1
            elif holder == claim or not is_due(holder, claim):
                return Verdict(claim.term, claim.epoch, True)
            elif not may_take(holder, claim):
                return Verdict(claim.term, claim.epoch, False, f"{self._path}.{number - 1} names other holders")
            else:
                content = {"term": claim.term, "epoch": claim.epoch, "members": to_runs(claim.members)}
                publish(place, json.dumps(content))  # the next pass reads it, whichever host wrote it
        raise ValueError("the files of the lease appear and disappear, or there are too many")
