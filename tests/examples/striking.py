"""Where a worker of an example may be struck in a sum: `Struck` of struck_hsdp.py, `Strikes` of struck_plain.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recover_megatron.collectives.ring.executor import RingGroup
from recover_megatron.membership.io.session import Session


def strikes_of(worker: int, text: str) -> set[tuple[int, str]]:
    """(iteration, phase) of those of ``WORKER@ITERATION:PHASE,...`` that are for ``worker``."""
    listed = [strike.replace("@", ":").split(":") for strike in text.split(",") if strike]
    return {(int(iteration), phase) for who, iteration, phase in listed if int(who) == worker}


def strike_in_sums(at: Callable[[str], None]) -> None:
    """Have ``at`` called with "reduce", when a sum has begun, "reduced", when all are made and the coordinator has not
    been told, and "agree", when it has been told and has not answered.
    """
    submit, report = RingGroup.all_reduce, Session.report_done

    def all_reduce(group: Any, bucket: Any) -> Any:
        handle = submit(group, bucket)
        at("reduce")
        return handle

    def report_done(session: Any, iteration: int) -> None:
        at("reduced")
        report(session, iteration)
        at("agree")

    RingGroup.all_reduce, Session.report_done = all_reduce, report_done  # type: ignore[method-assign]
