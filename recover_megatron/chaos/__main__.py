"""``python -m recover_megatron.chaos``: kill random workers of a running recover-run job, at random times.

The signals are real and come from outside, as they would in life.  The times between strikes are exponentially
distributed with the mean time between failures of the whole job; the seed decides the sequence of times, lots and
kinds, so a run with the same workers alive at the same times is struck alike.  Only workers of this host are struck.

Exit status: 0 when the run has ended; 1 if no worker lived; 2 for a mistake in the command or the folder.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recover_megatron import __version__
from recover_megatron.chaos.victims import Draw, Held, NoWorkers, Victims, draws
from recover_megatron.run_log.events import CHAOS_FILE, EventsFile

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_LOOK_AGAIN = 0.5
"""Seconds between two looks at workers.json; the end of a worker is seen at once."""


class Chaos:
    """One run of the command."""

    def __init__(self, log_dir: Path, max_kills: float, keep: int) -> None:
        self._victims = Victims(log_dir)
        self._file = EventsFile(log_dir / CHAOS_FILE)
        self._max_kills = max_kills
        self._keep = keep
        self._struck: set[int] = set()  # pids, ended or stopped: nobody is struck twice
        self.strikes = 0

    def wait_for_workers(self, seconds: float) -> bool:
        """Wait until a worker of the run lives here; False if none does in time."""
        deadline = time.monotonic() + seconds
        while not self._victims.live():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._victims.wait(min(_LOOK_AGAIN, left))
        return True

    def run(self, kinds: Sequence[str], seed: int, mtbf: float) -> None:
        """Strike until the run ends.  Raises NoWorkers."""
        due = time.monotonic()
        for number, draw in enumerate(draws(seed, mtbf, kinds), 1):
            due += draw.after
            if self.strikes >= self._max_kills:
                due = math.inf  # only see the run's end
            if not self._sleep_until(due):
                return
            self._inject(number, draw)

    def _sleep_until(self, due: float) -> bool:
        """Wait until it is ``due``; False if the run ended before: no worker lives or is about to."""
        while self._victims.live() or self._victims.expected:
            left = due - time.monotonic()
            if left <= 0:
                return True
            self._victims.wait(min(_LOOK_AGAIN, left))
        return False

    def _inject(self, number: int, draw: Draw) -> None:
        live = {worker: held for worker, held in self._victims.live().items() if held.pid not in self._struck}
        if len(live) <= self._keep:
            self._say("kept", draw, number=number, live=len(live), keep=self._keep)
            return
        held = live[draw.victim(list(live))]
        self._hit(number, draw, held)

    def _hit(self, number: int, draw: Draw, held: Held) -> None:
        at = time.time()
        if not held.send(SIGNALS[draw.kind]):
            self._say("miss", draw, number=number, worker=held.worker, pid=held.pid)
            return
        self._struck.add(held.pid)
        self.strikes += 1
        self._say("strike", draw, number=number, worker=held.worker, pid=held.pid, time=at, host=self._victims.host)

    def _say(self, event: str, draw: Draw, **fields: object) -> None:
        fields |= {"kind": draw.kind, "after": round(draw.after, 3), "lot": round(draw.lot, 6)}
        self._file.append(event, **fields)
        print(f"chaos: {event} " + " ".join(f"{name}={value}" for name, value in fields.items()), flush=True)

    def close(self) -> None:
        """Let go of everything."""
        self._victims.close()
        self._file.close()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recover_megatron.chaos",
        description="Kill random workers of a running recover-run job on this host; each strike goes to chaos.jsonl.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--log-dir", type=Path, required=True, metavar="DIR", help="the run's --log-dir")
    parser.add_argument(
        "--mtbf", type=float, required=True, metavar="SECONDS", help="mean time between two strikes, in the whole job"
    )
    parser.add_argument("--seed", type=int, required=True, metavar="S", help="decides the sequence of strikes")
    parser.add_argument("--kinds", default="kill", metavar="LIST", help="of kill and stop, comma-separated (kill)")
    parser.add_argument("--max-kills", type=int, metavar="N", help="strike no more than N times (default: no limit)")
    parser.add_argument("--keep", type=int, default=1, metavar="N", help="leave N workers here alone, at least (1)")
    parser.add_argument("--wait", type=float, default=60, metavar="SECONDS", help="for the first worker to live (60)")
    args = parser.parse_args(argv)
    args.kinds = args.kinds.split(",")
    if not (args.mtbf > 0 and math.isfinite(args.mtbf)):
        parser.error("--mtbf must be a positive number of seconds")
    if bad := [kind for kind in args.kinds if kind not in SIGNALS]:
        parser.error(f"--kinds: there is no {bad[0]!r}, only {' and '.join(SIGNALS)}")
    if args.keep < 0 or (args.max_kills or 0) < 0:
        parser.error("--keep and --max-kills cannot be negative")
    if not args.log_dir.is_dir():
        parser.error(f"--log-dir: there is no folder {args.log_dir}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    args = _parse(argv)
    chaos = Chaos(args.log_dir, math.inf if args.max_kills is None else args.max_kills, args.keep)
    try:
        if not chaos.wait_for_workers(args.wait):
            print(f"chaos: error: no worker of a run in {args.log_dir} lives on this host", file=sys.stderr)
            return 1
        chaos.run(args.kinds, args.seed, args.mtbf)
    except NoWorkers as error:
        print(f"chaos: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"chaos: stopped after {chaos.strikes} strikes; the run goes on", flush=True)
        return 128 + signal.SIGINT
    finally:
        chaos.close()
    print(f"chaos: the run has ended, after {chaos.strikes} strikes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
