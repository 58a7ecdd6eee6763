"""A worker as the tests run it: joins, agrees on one iteration after the other, prints what happens as JSON lines.

Lines on stdout: {"event": "plan"|"commit"|"revoke"|"pushed"|"out"|"end"|..., "mono": ..., ...}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recover_megatron.membership import CoordinatorLost, EpochRevoked, Fenced, Plan, Session, Settings, find_secret
from recover_megatron.membership.records import EXIT_FENCED, AuthenticationError


def tell(event: str, **fields: object) -> None:
    os.write(1, (json.dumps({"event": event, "mono": time.monotonic(), **fields}) + "\n").encode())


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def raise_and_tell(session: Session, iteration: int, options: dict[str, Any]) -> None:
    """An exception ends this worker, at once and without any orderly end."""
    if victim := options.get("kill_first"):
        os.kill(victim, signal.SIGKILL)
    try:
        raise RuntimeError("the loss is not a number")
    except RuntimeError as error:
        text = traceback.format_exc() + "x" * 100_000 + "the end"
        started = time.monotonic()
        said = f"{type(error).__name__}: {error}"
        heard = session.report_exception(iteration, 5, said, text, options["worker"])
        tell("last_words", heard=heard, seconds=time.monotonic() - started)
        os._exit(1)


def find_wrong_gradients(session: Session, iteration: int, options: dict[str, Any]) -> None:
    """This worker ends the run, as a step does (``Step.run``), once the file ``then`` is there, and then itself."""
    from recover_megatron.instep.hooks import ProgressReports

    tell("found")
    while not Path(options["then"]).exists():
        time.sleep(0.01)
    hooks: Any = SimpleNamespace(iteration=lambda: iteration)
    ProgressReports(session, hooks).end_run("worker 1 has found wrong gradients", RuntimeError("one is missing"))
    raise_and_tell(session, iteration, options)


def meet(session: Session, iteration: int, options: dict[str, Any]) -> None:
    """What only works with all mates, as the collectives inside a replica: no end of an epoch interrupts it."""
    folder = Path(str(options["meeting"]))
    (folder / f"{iteration}-{options['worker']}").touch()
    session.mark(iteration, "mates", waiting=True)
    while not all((folder / f"{iteration}-{mate}").exists() for mate in options["mates"]):
        time.sleep(0.01)


def join(session: Session, iteration: int, options: dict[str, Any]) -> Plan:
    plan = session.join({"iteration": iteration, **options.get("status", {})})
    tell("plan", epoch=plan.epoch, members=sorted(plan.members), committed=plan.committed)
    return plan


def work(session: Session, options: dict[str, Any]) -> int:
    step, last = options.get("step", 0.02), options.get("iterations", 10**9)
    if options.get("never_join"):
        tell("connected")
        signal.pause()
    plan = join(session, 1, options)
    iteration = plan.committed + 1
    if options.get("fork"):
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
        tell("forked")
    while options.get("spare"):
        session.idle()
        while not session.wait_revoked(timeout=0.1):
            tell("waiting", committed=session.committed)
        plan = join(session, plan.committed, options)
    while iteration <= last:
        try:
            if options.get("give_up_at") == iteration:
                session.give_up(42, "the disk is full")
            if options.get("wrong_at") == iteration:
                find_wrong_gradients(session, iteration, options)
            if iteration == options.get("raise_at"):
                raise_and_tell(session, iteration, options)
            session.mark(iteration, str(options.get("phase", "compute")), options.get("microbatch"))
            if options.get("busy"):
                burn(step)
            else:
                time.sleep(step)
            if options.get("hold_at") == iteration:
                ctypes.PyDLL(None).sleep(int(options["hold_seconds"]))  # does not release the interpreter
            if options.get("hang_at") == iteration:
                session.mark(iteration, "collective", waiting=bool(options.get("hang_waiting")))
                while not session.revoked:
                    time.sleep(0.01)
            if options.get("checkpoint_at") == iteration:
                session.mark(iteration, "checkpoint", allow=options["checkpoint_seconds"])
                time.sleep(options["checkpoint_seconds"])
            if options.get("mates"):
                meet(session, iteration, options)
            session.agree(iteration)
            tell("commit", iteration=iteration, epoch=session.epoch)
        except EpochRevoked as revoked:
            tell("revoke", epoch=revoked.epoch, reason=revoked.reason)
            if options.get("never_rejoin"):
                time.sleep(120)
            plan = join(session, iteration, options)
            iteration = max(iteration, plan.committed + 1)
            continue
        iteration += 1
    session.leave()
    return 0


def main() -> int:
    options = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it dies with its parent
    settings = Settings(**options.get("settings", {}))
    secret = find_secret(path=Path(options["secret_file"]))
    addresses = [tuple(address) for address in options["addresses"]]
    agent, newcomer = options.get("node_agent"), options.get("newcomer", False)
    more = {"newcomer": newcomer, "relay": options.get("relay", "")}
    session = Session.connect(addresses, options["worker"], secret, settings, node_agent=agent, **more)

    def pushed(epoch: int, reason: str) -> None:
        dead, left, opened = sorted(session.dead), sorted(session.left), sorted(session.opened_members)
        tell("pushed", epoch=epoch, reason=reason, dead=dead, left=left, opened=opened)

    session.on_revoke(pushed)
    try:
        code = work(session, options)
    except (Fenced, CoordinatorLost, AuthenticationError) as error:
        tell("out", reason=str(error))
        return error.code if isinstance(error, CoordinatorLost) else EXIT_FENCED if isinstance(error, Fenced) else 2
    tell("end")
    return code


if __name__ == "__main__":
    sys.exit(main())
