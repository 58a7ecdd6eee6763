"""Sources of a run's status: the user names the run by the coordinators' addresses or by the log folder.

addresses                   the coordinator's view
folder of a running job     the coordinator's view, and data about the training from the folder's files
folder of an ended job      only the folder's files

``Watch`` asks the candidate that gave the last answer.  If this candidate does not answer, does not lead (standby), or
has stopped with code 11 (other candidates may continue), ``Watch`` asks the next candidate.  If no candidate leads,
``Watch`` prefers the answer of a candidate that has not stopped, and then the answer with the most connected workers.
If no candidate answers, it raises ``NoAnswer``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from recover_megatron.arguments import parse_addresses
from recover_megatron.membership.io.observer import ANSWER_SECONDS, NoAnswer, Observer, OtherVersion
from recover_megatron.membership.records import EXIT_LOST_MAJORITY, Address, AuthenticationError
from recover_megatron.membership.wire import Secret, find_secret
from recover_megatron.status.folder import (
    History,
    candidates,
    ending,
    has_begun,
    last_written,
    may_go_on,
    secret_file,
    worker_processes,
)
from recover_megatron.status.model import RunStatus, read


class Watch:
    """Observer that asks the candidates at ``addresses`` for the run's status."""

    def __init__(self, addresses: Sequence[Address], secret: Secret, timeout: float = ANSWER_SECONDS) -> None:
        self._addresses = list(addresses)
        self._secret = secret
        self._timeout = timeout
        self._observer: Observer | None = None

    def look(self, drain: str | None = None) -> RunStatus:
        """Return the run's present status.  ``drain``: node or host that the run is asked to drain, or None.

        Raises ``AuthenticationError`` if all candidates that answer refuse the secret; else ``NoAnswer`` if no
        candidate sends a status (``OtherVersion``, a subclass, if a candidate has an incompatible version).
        """
        seconds: list[RunStatus] = []
        complaints: list[NoAnswer] = []
        refusals: list[AuthenticationError] = []
        again = self._observer is not None  # the candidate may live although its old connection is closed: ask again
        for _ in range(len(self._addresses) + again):
            try:
                status = self._ask(drain)
            except NoAnswer as error:
                complaints.append(error)
            except AuthenticationError as error:
                refusals.append(error)
            else:
                if not (status.state == "standby" or status.code == EXIT_LOST_MAJORITY):
                    return status
                seconds.append(status)
            self.close()
            self._addresses.append(self._addresses.pop(0))
        if seconds:
            return max(seconds, key=lambda status: (status.code is None, status.attached))
        if refusals:
            raise refusals[0]
        text = "; ".join(dict.fromkeys(map(str, complaints)))
        raise OtherVersion(text) if any(isinstance(error, OtherVersion) for error in complaints) else NoAnswer(text)

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def _ask(self, drain: str | None) -> RunStatus:
        if self._observer is None:
            self._observer = Observer(self._addresses[0], self._secret, self._timeout)
        answer, name = self._observer.ask(drain), self._observer.name
        try:
            return read(answer, name)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise NoAnswer(f"{name} answers with a view that cannot be read ({error!r})") from error


class FolderSource:
    """Source for the last launch into ``folder``.

    Raises ValueError, OSError or SecretError if there is no usable address or secret.
    """

    def __init__(self, folder: Path, secret: Path | None) -> None:
        """``secret``: file with the job's secret; None: use the folder's secret file, or else the environment."""
        self._folder = folder
        self.history = History(folder)
        self._watch: Watch | None = None
        if ending(folder) is None or may_go_on(folder):
            addresses = parse_addresses(candidates(folder))
            self._watch = Watch(addresses, find_secret(path=secret or secret_file(folder)))

    def look(self, drain: str | None = None) -> RunStatus:
        """Return the run's status, with data from the folder's files.  Argument and errors are as in ``Watch.look``."""
        status = ending(self._folder) if self._watch is None else None
        if status is None:
            assert self._watch is not None
            try:
                status = self._watch.look(drain)
            except OtherVersion:
                raise
            except (NoAnswer, AuthenticationError) as error:  # a coordinator that exits seems to refuse the secret
                status = ending(self._folder)
                if status is None and isinstance(error, AuthenticationError):
                    raise
                if status is None:
                    raise NoAnswer(f"{error}; {last_written(self._folder)}") from error
            if status.code is not None:
                status = ending(self._folder) or status
        self.history.read()
        now = self.history.now(status.commit_age) if status.code is None else time.time()
        training = None
        if status.epoch or has_begun(self._folder):  # before a launch has begun, the files are of an earlier launch
            training = self.history.training(now, now if status.code is None else self.history.last_time)
        return status.with_files(training, worker_processes(self._folder))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


Source = Watch | FolderSource


def source_of(where: str, secret: Path | None) -> Source:
    """Return the source for ``where``, a log folder or ``HOST:PORT,...``.  Raises the errors of ``FolderSource``."""
    if Path(where).is_dir():
        return FolderSource(Path(where), secret)
    try:
        addresses = parse_addresses(where)
    except ValueError as error:
        raise ValueError(f"{error}, and there is no such folder here") from None
    return Watch(addresses, find_secret(path=secret))
