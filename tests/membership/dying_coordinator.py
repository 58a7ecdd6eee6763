"""A coordinator that is killed while it tells of the commit of iteration 5: one member has heard of it, no other.

As ``python -m recover_megatron.membership`` else.
"""

from __future__ import annotations

import os
import signal
import sys

from recover_megatron.membership import __main__ as program
from recover_megatron.membership.io.server import CoordinatorServer
from recover_megatron.membership.messages.to_member import Commit, ToMember


class Dying(CoordinatorServer):
    def _send(self, sessions: tuple[int, ...], message: ToMember) -> None:
        if isinstance(message, Commit) and message.iteration == 5:
            super()._send(sessions[:1], message)
            os.kill(os.getpid(), signal.SIGKILL)
        super()._send(sessions, message)


if __name__ == "__main__":
    program.CoordinatorServer = Dying  # type: ignore[misc]
    sys.exit(program.main())
