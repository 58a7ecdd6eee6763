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

from recover_megatron.membership import CoordinatorLost, EpochRevoked, Fenced, Session, Settings, find_secret
from recover_megatron.membership.records import EXIT_FENCED, AuthenticationError


def tell(event: str, **fields: object) -> None:
    os.write(1, (json.dumps({"event": event, "mono": time.monotonic(), **fields}) + "\n").encode())


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def hold_the_interpreter(seconds: int) -> None:
    """A call into C that does not release the interpreter."""
    ctypes.PyDLL(None).sleep(seconds)


def raise_and_tell(session: Session, iteration: int, options: dict[str, object]) -> None:
    """An exception ends this worker, at once and without any orderly end."""
    if victim := options.get("kill_first"):
        os.kill(int(victim), signal.SIGKILL)  # type: ignore[call-overload]
    try:
        raise RuntimeError("the loss is not a number")
    except RuntimeError as error:
        text = traceback.format_exc() + "x" * 100_000 + "the end"
        started = time.monotonic()
        group = int(options["worker"])  # type: ignore[call-overload]
        heard = session.report_exception(iteration, 5, f"{type(error).__name__}: {error}", text, group)
        tell("last_words", heard=heard, seconds=time.monotonic() - started)
        os._exit(1)


def meet(session: Session, iteration: int, options: dict[str, object]) -> None:
    """What only works with all mates, as the collectives inside a replica: no end of an epoch interrupts it."""
    folder = Path(str(options["meeting"]))
    (folder / f"{iteration}-{options['worker']}").touch()
    session.mark(iteration, "mates", waiting=True)
    while not all((folder / f"{iteration}-{mate}").exists() for mate in options["mates"]):  # type: ignore[attr-defined]
        time.sleep(0.01)


def work(session: Session, options: dict[str, object]) -> int:
    step = float(options.get("step", 0.02))  # type: ignore[arg-type]
    last = int(options.get("iterations", 10**9))  # type: ignore[call-overload]
    hold = options.get("hold_at")
    stop_joining = options.get("never_rejoin")
    if options.get("never_join"):
        tell("connected")
        signal.pause()
    status = options.get("status") or {}
    plan = session.join({"iteration": 1, **status})
    tell("plan", epoch=plan.epoch, members=sorted(plan.members), committed=plan.committed)
    iteration = plan.committed + 1
    if options.get("fork"):
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
        tell("forked")
    while options.get("spare"):
        session.idle()
        tell("idle", epoch=session.epoch)
        while not session.wait_revoked(timeout=0.1):
            tell("waiting", committed=session.committed)
        plan = session.join({"iteration": plan.committed, **status})
        tell("plan", epoch=plan.epoch, members=sorted(plan.members), committed=plan.committed)
    while iteration <= last:
        try:
            if options.get("give_up_at") == iteration:
                session.give_up(42, "the disk is full")
            if iteration == options.get("raise_at"):
                raise_and_tell(session, iteration, options)
            session.mark(iteration, str(options.get("phase", "compute")), options.get("microbatch"))
            if options.get("busy"):
                burn(step)
            else:
                time.sleep(step)
            if hold == iteration:
                hold_the_interpreter(int(options["hold_seconds"]))  # type: ignore[call-overload]
            if options.get("hang_at") == iteration:
                tell("hanging", iteration=iteration)
                session.mark(iteration, "collective", waiting=bool(options.get("hang_waiting")))
                while not session.revoked:
                    time.sleep(0.01)
            if options.get("checkpoint_at") == iteration:
                session.mark(iteration, "checkpoint", allow=float(options["checkpoint_seconds"]))  # type: ignore[arg-type]
                time.sleep(float(options["checkpoint_seconds"]))  # type: ignore[arg-type]
            if options.get("mates"):
                meet(session, iteration, options)
            session.agree(iteration)
            tell("commit", iteration=iteration, epoch=session.epoch)
        except EpochRevoked as revoked:
            tell("revoke", epoch=revoked.epoch, reason=revoked.reason)
            if stop_joining:
                time.sleep(120)
            plan = session.join({"iteration": iteration, **status})
            tell("plan", epoch=plan.epoch, members=sorted(plan.members), committed=plan.committed)
            iteration = max(iteration, plan.committed + 1) if plan.committed >= iteration else iteration
            continue
        iteration += 1
    session.leave()
    return 0


def main() -> int:
    options = json.loads(sys.argv[1])
    if load := options.get("die_with_parent", True):
        ctypes.CDLL(None).prctl(1, 9 if load else 0)
    settings = Settings(**options.get("settings", {}))
    secret = find_secret(path=Path(options["secret_file"]))
    addresses = [tuple(address) for address in options["addresses"]]
    agent, newcomer = options.get("node_agent"), options.get("newcomer", False)
    session = Session.connect(addresses, options["worker"], secret, settings, node_agent=agent, newcomer=newcomer)
    session.on_revoke(
        lambda epoch, reason: tell(
            "pushed",
            epoch=epoch,
            reason=reason,
            dead=sorted(session.dead),
            left=sorted(session.left),
            opened=sorted(session.opened_members),
        )
    )
    try:
        code = work(session, options)
    except Fenced as error:
        tell("out", reason=str(error), kind="fenced")
        return EXIT_FENCED
    except CoordinatorLost as error:
        tell("out", reason=str(error), kind="lost")
        return error.code
    except AuthenticationError as error:
        tell("out", reason=str(error), kind="secret")
        return 2
    tell("end")
    return code


if __name__ == "__main__":
    sys.exit(main())
