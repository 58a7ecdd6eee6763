"""``recover-status HOST:PORT[,HOST:PORT...]``, or a log folder: what a running job does, from its coordinator.

Exit status: 0, also when the run turns out to have ended; 1 if nobody answers; 2 for a wrong address or secret.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recover_megatron import __version__
from recover_megatron.arguments import COORDINATOR_VARIABLE, parse_addresses
from recover_megatron.membership.auth import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret
from recover_megatron.membership.errors import AuthenticationError, SecretError
from recover_megatron.membership.observer import NoAnswer
from recover_megatron.status.folder import candidates, ending, secret_file
from recover_megatron.status.model import RunStatus
from recover_megatron.status.watch import Watch

EXIT_NOBODY = 1
EXIT_USAGE = 2
PATIENCE_SECONDS = 30.0
"""A live view that nobody answers any more ends after this long: a new coordinator leads sooner, or never."""
SHORTEST_INTERVAL = 0.5
"""Seconds; a coordinator refuses who asks more often."""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="recover-status",
        description="A live view of a running job, asked of its coordinator. Looking changes nothing in the run.",
        epilog="The job's secret: DIR/secret, if the launch made one up; else from the environment, "
        f"{SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} (a file of mode 0600). docs/status.md says where to find address "
        "and secret of a launch.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "addresses",
        nargs="?",
        default=os.environ.get(COORDINATOR_VARIABLE),
        metavar="HOST:PORT[,HOST:PORT...]",
        help=f"the candidate coordinators, or the launch's --log-dir (default: {COORDINATOR_VARIABLE})",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print one view and end")
    how.add_argument("--json", action="store_true", help="print one JSON object and end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="between two views (default: 1)")
    parser.add_argument("--secret-file", type=Path, metavar="PATH", help="instead of the environment; mode 0600")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if not SHORTEST_INTERVAL <= args.interval < 1e6:
        parser.error(f"--interval {args.interval:g}: give at least {SHORTEST_INTERVAL} seconds")
    if args.addresses is None:
        parser.error(f"give the coordinator's HOST:PORT, or set {COORDINATOR_VARIABLE}")
    folder = Path(args.addresses) if Path(args.addresses).is_dir() else None
    try:
        if folder is not None and (ended := ending(folder)) is not None:
            _print(ended, args.json)
            return 0
        addresses = parse_addresses(candidates(folder) if folder is not None else args.addresses)
        in_folder = secret_file(folder) if folder is not None else None
        watch = Watch(addresses, find_secret(path=args.secret_file or in_folder))
    except (SecretError, ValueError, OSError) as error:
        parser.error(str(error))
    try:
        return _show(watch, args)
    except AuthenticationError as error:
        return _refuse(f"{error}; set {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} to the secret of the run", EXIT_USAGE)
    except NoAnswer as error:
        hint = "the run is over (its launcher's output and events-*.jsonl say how), has not started, or is elsewhere"
        return _refuse(f"no coordinator answers: {error}\nEither {hint}.", EXIT_NOBODY)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    finally:
        watch.close()


def _show(watch: Watch, args: argparse.Namespace) -> int:
    if args.json or args.once:
        _print(watch.look(), args.json)
    else:
        from recover_megatron.status.live import follow  # rich takes its time to import

        follow(watch, args.interval, PATIENCE_SECONDS)
    return 0


def _print(status: RunStatus, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status.to_json()))
    else:
        from recover_megatron.status.live import show_once

        show_once(status)


def _refuse(reason: str, code: int) -> int:
    print(f"recover-status: error: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
