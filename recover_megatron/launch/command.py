"""Command recover-run: check the command line, then supervise the launch."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from recover_megatron import variables
from recover_megatron.arguments import config_or_defaults, listed_domains, own_domains, spares_from_argv
from recover_megatron.errors import UserError
from recover_megatron.launch import slurm
from recover_megatron.launch.command_line import arguments, preflight, readers
from recover_megatron.launch.command_line.forecast import LOSSES, Forecast, given_flags, of_launch
from recover_megatron.launch.command_line.plan import Domains, LaunchPlan, is_known, loopback, saves_checkpoints
from recover_megatron.launch.conclusion import save_folder
from recover_megatron.launch.device_test import command_of
from recover_megatron.launch.messages import CHECKED, SHARE_A_SECRET, continues_without, count
from recover_megatron.launch.nodes import peers, store
from recover_megatron.launch.nodes.control_plane import has_secret, own_address
from recover_megatron.launch.nodes.leasing import AUTO, OFF, lease_path
from recover_megatron.launch.supervisor import Supervisor
from recover_megatron.launch.workers.log_folder import NOBODY, Claim, FolderLock
from recover_megatron.launch.workers.processes import AGAIN_SECONDS
from recover_megatron.launch.workers.states import LAUNCH_FAILED, LEFT_OUT, REFUSED
from recover_megatron.logger import get_logger, use_lines
from recover_megatron.membership.records import SecretError
from recover_megatron.membership.wire import find_secret
from recover_megatron.network.system import use_all_descriptors
from recover_megatron.variables import HOST_VARIABLE
from recover_megatron.workload.domains import names

log = get_logger(__name__)


def run_guarded(argv: Sequence[str], attempt: int = 0, without: Sequence[int] = ()) -> int:
    """Open closed standard streams, then call ``run``; log an unexpected exception as a bug of recover-run."""
    _open_standard_streams()
    try:
        return run(argv, attempt, without)
    except Exception:  # noqa: BLE001 - logged in full; the reaper kills the workers when this process has ended
        traceback.print_exc()
        log.info("this is a bug in recover-run; all workers are killed")
        return LAUNCH_FAILED


def _open_standard_streams() -> None:
    """Open closed standard streams on /dev/null: otherwise the next opened file would get a stream's descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open to the end
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open to the end


def run(argv: Sequence[str], attempt: int = 0, without: Sequence[int] = ()) -> int:
    """Run the command line ``argv``.  Return the exit code, or START_AGAIN; ``--help`` raises SystemExit.

    ``attempt``: number of earlier attempts to start this launch; ``without``: see ``LaunchPlan``.
    """
    options, reserved = None, None
    try:
        options, reserved = _prepare(argv)
        if options.check:
            here = f"{count(options.nproc_per_node)} on this node"
            everywhere = f", {options.nnodes * options.nproc_per_node} overall" if options.nnodes > 1 else ""
            log.info(f"{CHECKED}. Without --check, this command would start {here}{everywhere}")
            if options.script and (own_limits := _limits(options)):
                log.info(f"needs of the launch on this host, as measured on CPUs: {own_limits.counted}")
            if found := _forecast(options):
                log.info(f"{LOSSES}:" + "".join(f"\n  {line}" for line in found.table()))
            return 0
        plan = replace(_plan(options, reserved, attempt), without=tuple(without))
        others, lock = _lock_folders(plan)
    except arguments.UsageError as error:
        if len(error.reasons) == 1:
            log.info(error.reasons[0])
        else:
            lines = "".join(f"\n  - {reason}" for reason in error.reasons)
            log.info(f"no worker was started, for these reasons:{lines}")
        if understood_options := options or error.options:
            _tell_others(understood_options, reserved or error.reserved, attempt, error.reasons)
        return error.code
    if options.taken:
        log.info("from the environment: " + ", ".join(f"{name}={value}" for name, value in options.taken.items()))
    if not options.slurm and options.nnodes == 1 and (hint := slurm.left_alone(os.environ)):
        log.info(hint)
    if plan.fault_tolerant:
        use_all_descriptors()  # the store holds a connection to each worker of the run
    if lock and plan.joins:
        plan = replace(plan, run_id=lock.run_id)
    return Supervisor(plan, reserved, os.environ, lock, others).run()


def _prepare(argv: Sequence[str]) -> tuple[arguments.Options, socket.socket | None]:
    """Check the command line, the script and this host.  Raises UsageError if a check fails.

    Return the options and, on node 0, the listening socket of the store.
    """
    options, reasons = arguments.parse(argv)
    understood = not reasons
    use_lines(options.log_format, f"{socket.gethostname()}-{options.node_rank}")
    if options.script and not options.module and (found := readers.installed_module(options.script)):
        log.info(f"{options.script} is not in this folder: using the installed {found[1]}")
        options.script, options.module = found[0], True
    reasons += arguments.check_files(options)
    lacking, notes = preflight.host()
    reasons += lacking
    if options.fault_tolerant:
        reasons += variables.refusals(os.environ)
    if options.nnodes == 1 and options.master_addr == arguments.DEFAULT_ADDR:
        options.master_addr = loopback()
    if options.script and not options.join:
        world = options.nnodes * options.nproc_per_node
        reasons += preflight.check(options.script, options.script_args, world)
    if "--recover" in options.script_args:
        reasons += _check_domains(options)
    if options.script and (own_limits := _limits(options)):
        notes += own_limits.notes
        if not _elsewhere(options):
            reasons += own_limits.reasons
    if options.script:
        reasons += _check_folders(options)
        if not options.check:
            reasons += preflight.devices(options.script, options.script_args, _here(options), os.environ)
    reserved: socket.socket | None = None
    reason: str | None = None
    several = options.nnodes > 1 or options.join
    outside = _elsewhere(options)  # a login node, on which --check may run, lacks addresses and secrets
    if several and not outside:
        reasons += _check_secret(options)
        reason = None if reasons else _await_others(options, options.rendezvous_timeout)
    if reason is None and not (outside or options.join or 0 < options.node_rank < options.nnodes):
        reserved, reason = store.open_listener(options.master_addr, options.master_port, options.nnodes)
    if reason:
        reasons.append(reason)
    if reasons:
        if reserved and (options.nnodes == 1 or not understood):
            reserved.close()
            reserved = None
        raise arguments.UsageError(reasons, options if understood else None, reserved)
    for note in notes:
        log.info(note)
    return options, reserved


def _elsewhere(options: arguments.Options) -> bool:
    """Return whether the command only checks (``--check``) a launch that also needs other hosts."""
    return options.check and (options.nnodes > 1 or options.join)


def _here(options: arguments.Options) -> int:
    """Return the number of workers of this node, including spares."""
    last = options.node_rank == options.nnodes - 1 and not options.join
    return options.nproc_per_node + (spares_from_argv(options.script_args) if last else 0)


def _limits(options: arguments.Options) -> preflight.Limits | None:
    """Compare this host's limits (open files, processes) with its workers' needs; return None if these are unknown."""
    world = options.world_size if options.join else options.nnodes * options.nproc_per_node
    return preflight.limits(str(options.script), options.script_args, world, _here(options), os.environ)


def _await_others(options: arguments.Options, seconds: float) -> str | None:
    """Wait at most ``seconds`` until the needed hosts' names can be resolved; return the reason if they cannot."""
    if not options.join:
        return store.await_names("--master-addr", [options.master_addr], seconds, log.info)
    if reason := store.await_names("--master-addr", [options.master_addr], 0.0, log.info):
        # Node 0 may be lost while the run continues, so an unknown name of node 0 is only logged.
        log.info(f"{reason.partition(': give')[0]}: the store of node 0 cannot be used here")
    return store.await_names("--recover-coordinator", [host for host, _ in options.coordinators], seconds, log.info)


def _tell_others(
    options: arguments.Options, reserved: socket.socket | None, attempt: int, reasons: Sequence[str]
) -> None:
    """Notify the other launchers that this node has refused a command line that they may have accepted."""
    if options.check or options.join or options.nnodes == 1 or (options.node_rank == 0 and reserved is None):
        return
    with contextlib.suppress(SecretError):
        secret = find_secret(os.environ) if has_secret(os.environ) else None
        peers.tell_refusal(_plan(options, reserved, attempt), secret, reserved, "; ".join(reasons))


def _check_folders(options: arguments.Options) -> list[str]:
    """Return the reasons why folders that the command line names cannot be used.

    Node 0 must be able to write into the folder of --save; with --recover or --elastic, every node must.  With --check,
    folders that another run uses are reported, too.
    """
    folders = _named_folders(saves_checkpoints(str(options.script), options.script_args), options.script_args)
    reasons: list[str | None] = []
    known = is_known(str(options.script), options.script_args)
    first, tried = options.node_rank == 0 and not options.join, not options.check
    writes = known and (first or options.fault_tolerant)
    if writes and (folder := folders.get("--save")) and (why := readers.why_not_written(folder, tried=tried)):
        where = f"({why}) on host {socket.gethostname()}"
        reasons.append(f"--save {folder} cannot be written {where}: no checkpoint could be saved there")
    if options.check:
        for option, place in {"--log-dir": options.log_dir, **folders}.items():
            lock = FolderLock(place, NOBODY, lambda text: None, option, needed=False) if place else None
            reasons += [lock.look()] if lock else []
    return [reason for reason in reasons if reason]


def _named_folders(saves: bool, script_args: Sequence[str]) -> dict[str, Path]:
    """Return, by flag, the folders of the script's arguments into which only one run at a time may write.

    ``saves``: True if the script's --save is Megatron's flag for the folder of checkpoints.
    """
    save = save_folder(script_args) if saves else None
    found = {"--save": save} if save and "://" not in save else {}
    flag = "--recover-log-dir"
    if "--recover" in script_args and (logs := given_flags(script_args, [flag]).get(flag)):
        found[flag] = logs[0]
    return {name: Path(folder) for name, folder in found.items()}


def _forecast(options: arguments.Options) -> Forecast | None:
    """Return the forecast for ``--check``, with the lease and the witness that the options request."""
    plan = _plan(options, None, 0)
    witness = options.witness not in (AUTO, OFF) or (options.witness == AUTO and options.slurm)
    return of_launch(plan, plan.domains, lease_path(plan, plan.run_id) is not None, witness)


def _check_domains(options: arguments.Options) -> list[str]:
    """Return the mistakes in the file of ``--recover-domain @FILE``: missing nodes, no entry for this host."""
    text, reasons = config_or_defaults(options.script_args).domain, list[str]()
    with contextlib.suppress(ValueError):  # the check of all flags reports the error
        if 0 < (hosts := len(listed_domains(text))) < options.nnodes:
            reasons.append(f"--recover-domain {text}: the file has {hosts} of {options.nnodes} nodes: add the others")
        try:
            _ = options.check or own_domains(text)
        except UserError as error:
            reasons.append(str(error))
    return reasons


def _domains(options: arguments.Options) -> Domains:
    """Return the domains of each node that ``--recover-domain @FILE`` lists; empty without such a file.

    The nodes are in SLURM's order if the file lists all of SLURM's nodes, else in the file's order.
    """
    try:
        listed = listed_domains(config_or_defaults(options.script_args).domain)
    except ValueError:
        return ()  # an earlier check has refused this value
    hosts = slurm.nodes_of(os.environ) if options.slurm else []
    hosts = hosts if hosts and all(host in listed for host in hosts) else [*listed]
    return tuple(names("", listed[host], {}) for host in hosts)


def _lock_folders(plan: LaunchPlan) -> tuple[list[FolderLock], FolderLock | None]:
    """Return the locks of the script's folders, and the lock of the log folder (None: there is no log folder).

    Node 0 takes the locks.  Other nodes and joining launchers only check them: they do not know the run's id yet.
    Raises UsageError if another run uses a folder.
    """
    started, address = time.time(), (plan.master_addr, plan.master_port)
    own_claim = Claim(os.getpid(), plan.host, started, plan.run_id, plan.nnodes, *address, plan.world_size)
    lock = FolderLock(plan.log_dir, own_claim, log.info) if plan.log_dir else None
    folders = {plan.log_dir.resolve()} if plan.log_dir else set()
    others: list[FolderLock] = []
    for option, folder in _named_folders(plan.saves, plan.script_args).items():
        if folder.resolve() in folders:
            continue
        folders.add(folder.resolve())
        with contextlib.suppress(OSError):  # the lock reports the error
            folder.mkdir(parents=True, exist_ok=True)
        other = FolderLock(folder.resolve(), own_claim, log.info, option, needed=False)
        if not (reason := _hold(other, plan)):
            others.append(other)
        elif not plan.joins:  # --join is not refused: the lock may be of the same run, under another address
            _refuse(others, other, plan, reason)
    if lock and (reason := _hold(lock, plan)):
        _refuse(others, lock, plan, reason)
    return others, lock


def _refuse(held: Sequence[FolderLock], taken: FolderLock, plan: LaunchPlan, reason: str) -> NoReturn:
    for lock in held:
        lock.end(REFUSED, reason)
    raise _in_use(taken, plan, reason)


def _hold(lock: FolderLock, plan: LaunchPlan) -> str | None:
    """Take the lock (node 0), check it (other nodes) or join the run that holds it (--join).

    Return None, or the reason why the folder cannot be used.
    """
    if plan.joins:
        return lock.join(plan.run_id)
    return lock.check() if plan.node_rank > 0 else lock.take()


def _in_use(lock: FolderLock, plan: LaunchPlan, reason: str) -> arguments.UsageError:
    if not lock.continued:
        return arguments.UsageError([reason])
    coordinators = f"$(recover-status {shlex.quote(str(plan.log_dir))} --coordinators)" if plan.log_dir else ""
    return arguments.UsageError([continues_without(plan, reason, coordinators)], code=LEFT_OUT)


def _check_secret(options: arguments.Options) -> list[str]:
    """Return the reason if the user's secret is not valid, or is missing although the run needs one.

    Only the user can give several nodes a common secret: their launchers cannot generate one.
    """
    if not has_secret(os.environ):
        missing = f"a run on several nodes needs a shared secret: {SHARE_A_SECRET}"
        if options.join:
            missing = f"--join needs the secret of the run: {SHARE_A_SECRET}"
        return [missing] if options.fault_tolerant else []
    try:
        find_secret(os.environ)
    except SecretError as error:
        return [str(error)]
    return []


def _plan(options: arguments.Options, reserved: socket.socket | None, attempt: int) -> LaunchPlan:
    patience = min(options.rendezvous_timeout, AGAIN_SECONDS) if attempt else options.rendezvous_timeout
    launch_id = secrets.token_hex(8)
    device_test = command_of(options.device_test_command, config_or_defaults(options.script_args).device)
    return LaunchPlan(
        nproc_per_node=options.nproc_per_node,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=reserved.getsockname()[1] if reserved else options.master_port,
        launch_id=launch_id,
        run_id=launch_id,
        host=socket.gethostname(),
        command=options.command(),
        fault_tolerant=options.fault_tolerant,
        elastic=options.elastic,
        script_args=tuple(options.script_args),
        control_plane=options.nnodes == 1 or has_secret(os.environ),
        max_restarts=options.max_restarts,
        device_test=device_test if options.max_restarts else (),
        device_test_timeout=options.device_test_timeout,
        # SLURM's batch script and the store run on node 0.  Its loss should not also cost the leading coordinator.
        first_candidate=1 if options.slurm and options.nnodes > 1 else 0,
        lease=options.lease,
        witness=options.witness,
        domains=_domains(options),
        spares=0 if options.join else spares_from_argv(options.script_args),
        joins=options.coordinators,
        joined_world_size=options.world_size,
        node_address=own_address(os.environ.get(HOST_VARIABLE, "")) or None,
        log_dir=options.log_dir,
        rendezvous_timeout=patience,
        attempt=attempt,
        grace_seconds=options.grace_seconds,
        log_format=options.log_format,
    )
