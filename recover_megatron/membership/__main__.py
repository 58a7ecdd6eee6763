"""``recover-coordinator``: one candidate coordinator as a separate process."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recover_megatron import __version__
from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.io.journal import Journal
from recover_megatron.membership.io.lease import Lease
from recover_megatron.membership.io.server import CoordinatorServer
from recover_megatron.membership.io.testimony import Scope, WitnessThread
from recover_megatron.membership.records import MAX_WORKERS, Planner, SecretError, Settings, members_only
from recover_megatron.membership.wire import find_secret
from recover_megatron.network.connection import family_of
from recover_megatron.variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE

EXIT_USAGE = 2
BACKLOG = 4096


def make_parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="recover-coordinator",
        description="Run one candidate coordinator. Give all candidates of a run the same options. Members try the "
        "candidates in the order of their address list; one candidate leads at a time.",
        epilog=f"The job's secret comes from the environment: {SECRET_VARIABLE}, or {SECRET_FILE_VARIABLE} (a file of "
        "mode 0600). Exit codes: 0 all workers left, 1 every worker would fail, 10 no worker or no possible plan "
        "remains, 11 this side of a partition may not continue, 12 state lost; else a worker's code, or 128 + signal.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of workers of the run")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: loopback, any free port")
    where.add_argument("--listen-fd", type=int, metavar="FD", help="file descriptor of a bound, inherited socket")
    parser.add_argument("--secret-file", type=Path, metavar="PATH", help="the secret's file (default: environment)")
    parser.add_argument("--events", type=Path, metavar="PATH", help="event log, JSON lines (default: stderr)")
    parser.add_argument("--planner", metavar="MODULE:FUNCTION", help="planner (default: the plan only lists members)")
    parser.add_argument(
        "--lease", type=Path, metavar="PATH", help="lease files PATH.1, ... on shared storage; a new PATH for each run"
    )
    parser.add_argument(
        "--slack", type=int, default=0, metavar="N", help="with --lease: it decides if halves differ by up to N workers"
    )
    parser.add_argument(
        "--witness-fd", type=int, metavar="FD", help="with --lease: FD of a JSON file with the witness's kind and nodes"
    )
    parser.add_argument("--witnessed", action="store_true", help="with --lease: only other candidates have a witness")
    parser.add_argument("--min-replicas", type=int, default=1, metavar="N", help="fewest replicas that --grace leaves")
    parser.add_argument("--start-needs-all", action="store_true", help="stop if a worker is lost before the first plan")
    for name in ("heartbeat_interval", "heartbeat_timeout", "hang_timeout", "stall_timeout", "start_timeout", "grace"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=float, default=getattr(defaults, name), metavar="S", help="default: %(default)s")
    return parser


def load_planner(name: str | None) -> Planner:
    """Return the function that ``--planner`` names. Raises ``ValueError`` with the reason if it cannot be loaded."""
    if name is None:
        return members_only
    module_name, _, function_name = name.partition(":")
    try:
        planner = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--planner {name}: {error}") from error
    if not callable(planner):
        raise ValueError(f"--planner {name} is not a function")
    return planner


def make_listener(listen: str, descriptor: int | None) -> socket.socket:
    """Return a socket that listens on ``listen``, or the inherited socket ``descriptor``.

    Raises ``ValueError`` for a malformed address, ``OSError`` if the socket cannot listen.
    """
    if descriptor is not None:
        listener = socket.socket(fileno=descriptor)
        listener.listen(BACKLOG)
        return listener
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"--listen {listen}: give HOST:PORT")
    host = host.removeprefix("[").removesuffix("]")
    return socket.create_server((host, int(port)), family=family_of(host), backlog=BACKLOG, reuse_port=False)


def address_of(listener: socket.socket) -> str:
    """Return ``HOST:PORT`` or ``[HOST]:PORT``, the form that ``--listen`` takes."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def settings_from(args: argparse.Namespace) -> Settings:
    """Return the settings of the protocol. Raises ``ValueError`` if their times contradict each other."""
    settings = Settings.of(args)
    if not 0 < settings.heartbeat_interval * 2 <= settings.heartbeat_timeout:
        raise ValueError("--heartbeat-timeout must be at least twice --heartbeat-interval")
    if settings.stall_timeout < 0:
        raise ValueError("--stall-timeout must not be negative")
    if settings.hang_timeout < settings.heartbeat_interval or settings.start_timeout <= 0:
        raise ValueError("--hang-timeout must not be below --heartbeat-interval, --start-timeout must be positive")
    return settings


def read_scope(descriptor: int | None) -> Scope | None:
    """Return the ``Scope`` in the JSON file ``descriptor``; None if ``descriptor`` is None.

    Raises ``ValueError`` if the file is malformed, ``OSError`` if it cannot be read.
    """
    if descriptor is None:
        return None
    with open(descriptor, encoding="utf-8") as file:
        return Scope.from_json(json.load(file))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if not 0 < args.world <= MAX_WORKERS:
        parser.error(f"--world must be between 1 and {MAX_WORKERS}")
    try:
        settings = settings_from(args)
        secret = find_secret(path=args.secret_file)
        planner = load_planner(args.planner)
        journal = Journal(args.events)
        scope = read_scope(args.witness_fd)
        listener = make_listener(args.listen, args.listen_fd)
    except (SecretError, ValueError, OSError) as error:
        parser.error(str(error))
    if (scope or args.witnessed) and args.lease is None:
        parser.error("--witness-fd and --witnessed need --lease")
    nodes = frozenset(scope.places) if scope else frozenset[str]() if args.witnessed else None
    salt = secrets.randbits(32)
    slack = None if args.lease is None else args.slack
    lease_path = None if args.lease is None else str(args.lease)
    core = Coordinator(args.world, settings, salt, planner, slack, time.monotonic(), lease_path, nodes)
    server = CoordinatorServer(core, listener, secret, journal)
    if args.lease is not None:
        server.lease = Lease(args.lease, server.post)
    if scope is not None:
        server.witness = WitnessThread(scope, server.post)
    address = address_of(listener)
    print(json.dumps({"listening": address}), flush=True)
    journal({"event": "listening", "address": address, "world": args.world})
    gc.set_threshold(1_000_000)  # with the default, collections take a quarter of the time in which 16,384 workers join
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return server.serve_forever()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        server.close()
        journal.close()


if __name__ == "__main__":
    sys.exit(main())
