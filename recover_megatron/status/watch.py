"""Whom to ask: the candidate that leads, among the addresses given.

current candidate --view--> shown, asked again next time
        |  standby, stop with code 11 (others may go on), no answer
        v
next candidate ...  none leads: the best of what they said; nobody said anything: ``NoAnswer``
"""

from __future__ import annotations

from collections.abc import Sequence

from recover_megatron.membership.auth import Secret
from recover_megatron.membership.client import Address
from recover_megatron.membership.errors import EXIT_LOST_MAJORITY, AuthenticationError
from recover_megatron.membership.observer import ANSWER_SECONDS, NoAnswer, Observer, OtherVersion
from recover_megatron.status.model import RunStatus
from recover_megatron.status.view_reader import read


class Watch:
    """Looks at the run whose candidates have these addresses."""

    def __init__(self, addresses: Sequence[Address], secret: Secret, timeout: float = ANSWER_SECONDS) -> None:
        self._addresses = list(addresses)
        self._secret = secret
        self._timeout = timeout
        self._observer: Observer | None = None

    def look(self, drain: str | None = None) -> RunStatus:
        """The run now, after ``drain``, a node or host, was asked to be drained.

        Raises ``NoAnswer`` if nobody answers (``OtherVersion`` if one does whom this version does not understand),
        ``AuthenticationError`` if all who do refuse us.
        """
        seconds: list[RunStatus] = []
        complaints: list[NoAnswer] = []
        refusals: list[AuthenticationError] = []
        again = self._observer is not None  # the connection may have ended, and its candidate be there: one more try
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
            self._next()
        if seconds:
            return max(seconds, key=lambda status: (status.code is None, status.attached))
        if refusals:
            raise refusals[0]
        told = "; ".join(dict.fromkeys(map(str, complaints)))
        raise OtherVersion(told) if any(isinstance(error, OtherVersion) for error in complaints) else NoAnswer(told)

    def close(self) -> None:
        """End the connection."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def _ask(self, drain: str | None) -> RunStatus:
        if self._observer is None:
            self._observer = Observer(self._addresses[0], self._secret, self._timeout)
        answer, name = self._observer.ask(drain), self._observer.name
        try:
            return read(answer, name)
        except (KeyError, TypeError, ValueError) as error:
            raise NoAnswer(f"{name} answers with a view that cannot be read ({error!r})") from error

    def _next(self) -> None:
        """Turn to the next candidate."""
        self.close()
        self._addresses.append(self._addresses.pop(0))
