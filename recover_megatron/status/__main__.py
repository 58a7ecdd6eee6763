"""Command ``recover-status``: the status of a running job, given by HOST:PORT[,HOST:PORT...] or by its log folder.

Exit status: 0, also if the run has already ended; 1 if no coordinator answers; 2 for a wrong address or secret.
With ``--check``, the exit status is a ``headline.Level``, as Nagios plugins use; with ``drain``, a ``DrainExit``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

from recover_megatron import __version__
from recover_megatron.membership.io.observer import NoAnswer, OtherVersion
from recover_megatron.membership.records import AuthenticationError, SecretError, ranges
from recover_megatron.status.folder import candidates
from recover_megatron.status.headline import Level, headline
from recover_megatron.status.model import DrainStatus, RunStatus
from recover_megatron.status.source import Source, source_of
from recover_megatron.variables import COORDINATOR_VARIABLE, SECRET_FILE_VARIABLE, SECRET_VARIABLE

EXIT_NOBODY = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of an interrupted ``drain``; it must not be 0, which means that the node may be switched off."""
PATIENCE_SECONDS = 30.0
"""Seconds without an answer after which a live view or ``drain`` ends with an error; longer than an election takes."""
SHORTEST_INTERVAL = 0.5
"""Smallest ``--interval``, in seconds, since a coordinator refuses more frequent requests of an observer."""
PAUSE_SECONDS = 0.5
"""Seconds between two requests of ``drain``."""


class DrainExit(IntEnum):
    """Exit codes of ``drain``, in addition to ``EXIT_NOBODY`` and ``EXIT_INTERRUPTED``."""

    DRAINED = 0
    """The node may be switched off."""
    REFUSED = 3
    """The drain was refused, and the node's workers stay; if NODE is a host, some of its nodes may be drained now."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recover-status",
        description="Show a live view of a running job, from its coordinator. A view changes nothing in the run. "
        "drain NODE makes the workers of a node leave the run, so that the node can be switched off.",
        epilog="The job's secret: DIR/secret, if the launch generated one; else from the environment, "
        f"{SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} (a file of mode 0600). docs/monitoring.md describes where to "
        "find the address and the secret of a launch.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "addresses",
        nargs="?",
        default=os.environ.get(COORDINATOR_VARIABLE),
        metavar="DIR|HOST:PORT[,HOST:PORT...]",
        help=f"addresses of the candidate coordinators, or the launch's --log-dir (default: {COORDINATOR_VARIABLE})",
    )
    parser.add_argument(
        "drain",
        nargs="*",
        metavar="drain NODE",
        help="make the workers of NODE (a node as named in the view, or a host) leave the run at the next iteration "
        "without losing a step, and wait until NODE may be switched off (exit code 0; 3: the run needs NODE)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print one view and exit")
    how.add_argument("--watch", action="store_true", help="show views continuously (the default)")
    how.add_argument(
        "--check",
        action="store_true",
        help="print one line and exit with a code for monitoring: "
        "0 healthy or finished, 1 degraded, recovering or starting, 2 stalled or failed, 3 unknown",
    )
    how.add_argument("--json", action="store_true", help="print one JSON object and exit")
    how.add_argument(
        "--coordinators",
        action="store_true",
        help="print the addresses of all candidates in the log folder DIR, in the format of recover-run --join "
        "(--recover-coordinator), and exit; no coordinator is asked",
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between views (default: 1)")
    parser.add_argument("--secret-file", type=Path, metavar="PATH", help="file with the job's secret; mode 0600")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    if sys.stdout is None:  # the shell has closed stdout (>&-): only the exit code is of use
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    parser = make_parser()
    args = parser.parse_args(argv)
    if not SHORTEST_INTERVAL <= args.interval < 1e6:
        parser.error(f"--interval {args.interval:g}: give at least {SHORTEST_INTERVAL} seconds")
    if args.addresses == "drain" and len(args.drain) == 1 and COORDINATOR_VARIABLE in os.environ:
        args.addresses, args.drain = os.environ[COORDINATOR_VARIABLE], ["drain", *args.drain]
    if args.drain and (len(args.drain) != 2 or args.drain[0] != "drain" or not args.drain[1]):
        parser.error(f"{' '.join(args.drain)}: the only command is: drain NODE")
    if args.drain and (args.once or args.watch or args.check or args.json or args.coordinators):
        parser.error("drain NODE shows its progress, and takes no option for a view, such as --once")
    if args.addresses is None:
        parser.error(f"give the coordinator's HOST:PORT, or set {COORDINATOR_VARIABLE}")
    if args.coordinators:
        try:
            print(candidates(Path(args.addresses)) if Path(args.addresses).is_dir() else args.addresses)
        except (ValueError, OSError) as error:
            return _refuse(str(error), EXIT_NOBODY)
        return 0
    try:
        source = source_of(args.addresses, args.secret_file)
    except (SecretError, ValueError, OSError) as error:
        if args.check:
            return _refuse(str(error), EXIT_USAGE, check=True)
        parser.error(str(error))
    try:
        code = _show(source, args)
        sys.stdout.flush()  # inside this ``try``, which handles an OSError
        return code
    except AuthenticationError as error:
        message = f"{error}; set {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} to the secret of the run"
        return _refuse(message, EXIT_USAGE, check=args.check)
    except OtherVersion as error:
        return _refuse(str(error), EXIT_NOBODY, check=args.check)
    except NoAnswer as error:
        hint = "the run is over (see its launcher's output and events-*.jsonl), has not started, or has another address"
        more = "" if args.check else f"\nEither {hint}."
        return _refuse(f"no coordinator answers: {error}{more}", EXIT_NOBODY, check=args.check)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED if args.drain else 0
    except BrokenPipeError:
        _print_no_more()
        return EXIT_NOBODY if args.drain else 0
    except OSError as error:  # reading a log file, or writing the output, failed
        _print_no_more()
        return _refuse(str(error), Level.UNKNOWN if args.check else EXIT_NOBODY)
    finally:
        source.close()


def _show(source: Source, args: argparse.Namespace) -> int:
    if args.drain:
        return drain(args.drain[1], source.look, PATIENCE_SECONDS, lambda text: print(text, flush=True))
    if args.check:
        status = source.look()
        head = headline(status)
        print(f"{head.text}; iteration {status.iteration}" if status.iteration else head.text)
        return head.level
    if args.json:
        status = source.look()
        print(json.dumps({"headline": headline(status).word, **status.to_json()}))
    elif args.once:
        from recover_megatron.status.screen import show_once

        show_once(source.look())
    else:
        from recover_megatron.status.screen import follow  # imported only here, because the import of rich takes long

        follow(source, args.interval, PATIENCE_SECONDS)
    return 0


def _print_no_more() -> None:
    """Redirect stdout to /dev/null after a failed write, so that the interpreter's last flush does not fail, too."""
    with contextlib.suppress(OSError):  # stdout may have no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(reason: str, code: int, *, check: bool = False) -> int:
    """Print ``reason`` as an error; return the exit status ``code``.

    ``check``: True to print ``reason`` to stdout instead, and return ``Level.UNKNOWN``, as monitoring expects.
    """
    if check:
        print(f"UNKNOWN: {reason}")
        return Level.UNKNOWN
    print(f"recover-status: error: {reason}", file=sys.stderr)
    return code


def drain(node: str, look: Callable[[str | None], RunStatus], patience: float, say: Callable[[str], None]) -> DrainExit:
    """Ask to drain ``node`` (a node, or a host with all its nodes), and report progress until the outcome is known.

    ask -> asked, moving: a line for each change -> drained: the node may be switched off
                                               |--> refused: the reason; for a host, also its drained nodes
                                               '--> the run ends: the node may be switched off, too

    The request is sent again until the status lists the node, since a new coordinator may not know an earlier request.
    Ctrl-C ends the command but does not withdraw the request.

    ``look(name)`` asks to drain ``name`` and returns the status; ``look(None)`` only returns the status.  Raises
    ``NoAnswer`` or ``AuthenticationError`` if no coordinator answers for ``patience`` seconds, ``AuthenticationError``
    also if the secret is refused before the first answer, and any other exception of ``look``.
    """
    last, silent_since, known, answered = "", None, False, False
    while True:
        try:
            status = look(None if known else node)
        except (NoAnswer, AuthenticationError) as error:  # a refusal after an answer comes from an exiting coordinator
            silent_since = silent_since or time.monotonic()
            refused = isinstance(error, AuthenticationError) and not answered
            if refused or time.monotonic() - silent_since > patience:
                raise
        else:
            silent_since, answered = None, True
            if status.code is not None:
                say(f"the run has ended ({status.reason}): no worker runs on {node}")
                return DrainExit.DRAINED
            rows = [row for row in status.drains if node in row.names]
            known = bool(rows)
            text, end = _progress(node, rows)
            if text and text != last:
                say(text)
                last = text
            if end is not None:
                return end
        time.sleep(PAUSE_SECONDS)


def _progress(node: str, rows: list[DrainStatus]) -> tuple[str, DrainExit | None]:
    """Return a message about the drain of ``node``, and the exit code, which is None while the drain is under way.

    ``rows``: status of each node to which the name ``node`` applies.
    """
    if not rows:
        return "", None
    running = [row for row in rows if row.state in ("asked", "moving")]
    refused = [row for row in rows if row.state == "refused"]
    if running:
        workers = ranges(sorted(worker for row in running for worker in row.workers))
        doing = "drain is requested" if any(row.state == "asked" for row in running) else "leaves at the next iteration"
        return f"{node}: {doing}; workers there: {workers or 'none'}", None
    if refused:
        drained = " and ".join(row.node for row in rows if row not in refused)
        if not drained:
            return f"{node} is not drained, and nothing has changed: {refused[0].reason}", DrainExit.REFUSED
        stays = ". ".join(f"{row.node} stays: {row.reason}" for row in refused)
        return f"{node} is not completely drained. {stays}. Drained: {drained}", DrainExit.REFUSED
    return f"{node} is drained: it may be switched off", DrainExit.DRAINED


if __name__ == "__main__":
    sys.exit(main())
