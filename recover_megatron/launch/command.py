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
from recover_megatron.arguments import listed_domains
from recover_megatron.errors import UserError
from recover_megatron.launch import slurm
from recover_megatron.launch.command_line import arguments, preflight, readers
from recover_megatron.launch.command_line.forecast import LOSSES, Forecast, of_launch
from recover_megatron.launch.command_line.spec import DEFAULT_ADDR, HostLimits, LaunchSpec
from recover_megatron.launch.conclusion import save_folder
from recover_megatron.launch.messages import CHECKED, SHARE_A_SECRET, continues_without, count
from recover_megatron.launch.nodes import peers, store
from recover_megatron.launch.nodes.addresses import loopback
from recover_megatron.launch.nodes.leasing import AUTO, OFF, lease_path
from recover_megatron.launch.supervisor import Supervisor
from recover_megatron.launch.workers.log_folder import NOBODY, Claim, FolderLock
from recover_megatron.launch.workers.processes import AGAIN_SECONDS
from recover_megatron.launch.workers.states import LAUNCH_FAILED, LEFT_OUT, REFUSED
from recover_megatron.logger import get_logger, use_lines
from recover_megatron.membership.records import SecretError
from recover_megatron.network.system import use_all_descriptors

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

    ``attempt``: number of earlier attempts to start this launch; ``without``: see ``LaunchSpec``.
    """
    spec, reserved = None, None
    try:
        spec, reserved = _prepare(argv)
        if spec.check:
            here = f"{count(spec.nproc_per_node)} on this node"
            everywhere = f", {spec.nnodes * spec.nproc_per_node} overall" if spec.nnodes > 1 else ""
            log.info(f"{CHECKED}. Without --check, this command would start {here}{everywhere}")
            if spec.script.target and (own_limits := preflight.limits(spec)):
                log.info(f"needs of the launch on this host, as measured on CPUs: {own_limits.counted}")
            if found := _forecast(spec):
                log.info(f"{LOSSES}:" + "".join(f"\n  {line}" for line in found.table()))
            return 0
        spec = _started(spec, reserved, attempt, without)
        others, lock = _lock_folders(spec)
    except arguments.UsageError as error:
        if len(error.reasons) == 1:
            log.info(error.reasons[0])
        else:
            lines = "".join(f"\n  - {reason}" for reason in error.reasons)
            log.info(f"no worker was started, for these reasons:{lines}")
        reserved = reserved or error.reserved
        if understood := spec or error.spec:
            _tell_others(_started(understood, reserved, attempt, without), reserved, error)
        return error.code
    if spec.taken:
        log.info("from the environment: " + ", ".join(f"{name}={value}" for name, value in spec.taken.items()))
    if not spec.slurm and spec.nnodes == 1 and (hint := slurm.left_alone(spec.environ)):
        log.info(hint)
    if spec.fault_tolerant:
        use_all_descriptors()  # the store holds a connection to each worker of the run
    if lock and spec.join:
        spec = replace(spec, run_id=lock.run_id)
    return Supervisor(spec, reserved, lock, others).run()


def _prepare(argv: Sequence[str]) -> tuple[LaunchSpec, socket.socket | None]:
    """Check the command line, the script and this host.  Raises UsageError if a check fails.

    Return the launch and, on node 0, the listening socket of the store.
    """
    spec, reasons = arguments.parse(argv)
    understood = not reasons
    use_lines(spec.log_format, f"{spec.host}-{spec.node_rank}")
    script = spec.script
    if script.target and not spec.module and (found := readers.installed_module(script.target)):
        log.info(f"{script.target} is not in this folder: using the installed {found[1]}")
        spec = replace(spec, script=replace(script, target=found[0]), module=True)
    reasons += arguments.check_files(spec)
    lacking, notes = preflight.host()
    reasons += lacking
    if spec.fault_tolerant:
        reasons += variables.refusals(spec.environ)
    if spec.nnodes == 1 and spec.master_addr == DEFAULT_ADDR:
        spec = replace(spec, master_addr=loopback())
    several = spec.nnodes > 1 or spec.join
    outside = spec.check and several  # a login node, on which --check may run, lacks addresses and secrets
    if spec.script.target:
        spec = replace(spec, limits=HostLimits.read())
        reasons += [] if spec.join else preflight.check(spec)
        reasons += _check_domains(spec) if "--recover" in spec.script.args else []
        if own_limits := preflight.limits(spec):
            notes += own_limits.notes
            reasons += [] if outside else own_limits.reasons
        reasons += _check_folders(spec)
        reasons += [] if spec.check else preflight.devices(spec)
    reserved: socket.socket | None = None
    reason: str | None = None
    if several and not outside:
        reasons += _check_secret(spec)
        reason = None if reasons else _await_others(spec, spec.rendezvous_timeout)
    if reason is None and not (outside or spec.join or 0 < spec.node_rank < spec.nnodes):
        reserved, reason = store.open_listener(spec.master_addr, spec.master_port, spec.nnodes)
    if reason:
        reasons.append(reason)
    if reasons:
        if reserved and (spec.nnodes == 1 or not understood):
            reserved.close()
            reserved = None
        raise arguments.UsageError(reasons, spec if understood else None, reserved)
    for note in notes:
        log.info(note)
    return spec, reserved


def _started(spec: LaunchSpec, reserved: socket.socket | None, attempt: int, without: Sequence[int]) -> LaunchSpec:
    """Return the launch with an id, and with what is known since its checks; ``reserved``: socket of node 0's store."""
    launch_id = secrets.token_hex(8)
    return replace(
        spec,
        master_port=reserved.getsockname()[1] if reserved else spec.master_port,
        launch_id=launch_id,
        run_id=launch_id,
        rendezvous_timeout=min(spec.rendezvous_timeout, AGAIN_SECONDS) if attempt else spec.rendezvous_timeout,
        attempt=attempt,
        without=tuple(without),
    )


def _await_others(spec: LaunchSpec, seconds: float) -> str | None:
    """Wait at most ``seconds`` until the needed hosts' names can be resolved; return the reason if they cannot."""
    if not spec.join:
        return store.await_names("--master-addr", [spec.master_addr], seconds, log.info)
    if reason := store.await_names("--master-addr", [spec.master_addr], 0.0, log.info):
        # Node 0 may be lost while the run continues, so an unknown name of node 0 is only logged.
        log.info(f"{reason.partition(': give')[0]}: the store of node 0 cannot be used here")
    return store.await_names("--recover-coordinator", [host for host, _ in spec.coordinators], seconds, log.info)


def _tell_others(spec: LaunchSpec, reserved: socket.socket | None, error: arguments.UsageError) -> None:
    """Notify the other launchers that this node has refused a command line that they may have accepted."""
    if spec.check or spec.join or spec.nnodes == 1 or (spec.node_rank == 0 and reserved is None):
        return
    with contextlib.suppress(SecretError):
        peers.tell_refusal(spec, spec.secret(), reserved, "; ".join(error.reasons))


def _check_folders(spec: LaunchSpec) -> list[str]:
    """Return the reasons why folders that the command line names cannot be used.

    Node 0 must be able to write into the folder of --save; with --recover or --elastic, every node must.  With --check,
    folders that another run uses are reported, too.
    """
    folders = _named_folders(spec)
    reasons: list[str | None] = []
    first, tried = spec.node_rank == 0 and not spec.join, not spec.check
    writes = spec.script.is_known and (first or spec.fault_tolerant)
    if writes and (folder := folders.get("--save")) and (why := readers.why_not_written(folder, tried=tried)):
        where = f"({why}) on host {socket.gethostname()}"
        reasons.append(f"--save {folder} cannot be written {where}: no checkpoint could be saved there")
    if spec.check:
        for option, place in {"--log-dir": spec.log_dir, **folders}.items():
            lock = FolderLock(place, NOBODY, lambda text: None, option, needed=False) if place else None
            reasons += [lock.look()] if lock else []
    return [reason for reason in reasons if reason]


def _named_folders(spec: LaunchSpec) -> dict[str, Path]:
    """Return, by flag, the folders of the script's arguments into which only one run at a time may write."""
    save = save_folder(spec.script.args) if spec.script.saves_checkpoints else None
    found = {"--save": save} if save and "://" not in save else {}
    flag = "--recover-log-dir"
    if "--recover" in spec.script.args and (logs := spec.script.given.get(flag)):
        found[flag] = logs[0]
    return {name: Path(folder) for name, folder in found.items()}


def _forecast(spec: LaunchSpec) -> Forecast | None:
    """Return the forecast for ``--check``, with the lease and the witness that the options request."""
    witness = spec.witness not in (AUTO, OFF) or (spec.witness == AUTO and spec.slurm)
    return of_launch(spec, spec.domains, lease_path(spec, spec.run_id) is not None, witness)


def _check_domains(spec: LaunchSpec) -> list[str]:
    """Return the mistakes in the file of ``--recover-domain @FILE``: missing nodes, no entry for this host."""
    text, reasons = spec.script.recover.domain, list[str]()
    with contextlib.suppress(ValueError):  # the check of all flags reports the error
        if 0 < (hosts := len(listed_domains(text))) < spec.nnodes:
            reasons.append(f"--recover-domain {text}: the file has {hosts} of {spec.nnodes} nodes: add the others")
        try:
            _ = spec.check or spec.own_domains
        except UserError as error:
            reasons.append(str(error))
    return reasons


def _lock_folders(spec: LaunchSpec) -> tuple[list[FolderLock], FolderLock | None]:
    """Return the locks of the script's folders, and the lock of the log folder (None: there is no log folder).

    Node 0 takes the locks.  Other nodes and joining launchers only check them: they do not know the run's id yet.
    Raises UsageError if another run uses a folder.
    """
    started, address = time.time(), (spec.master_addr, spec.master_port)
    own_claim = Claim(os.getpid(), spec.host, started, spec.run_id, spec.nnodes, *address, spec.world_size)
    lock = FolderLock(spec.log_dir, own_claim, log.info) if spec.log_dir else None
    folders = {spec.log_dir.resolve()} if spec.log_dir else set()
    others: list[FolderLock] = []
    for option, folder in _named_folders(spec).items():
        if folder.resolve() in folders:
            continue
        folders.add(folder.resolve())
        with contextlib.suppress(OSError):  # the lock reports the error
            folder.mkdir(parents=True, exist_ok=True)
        other = FolderLock(folder.resolve(), own_claim, log.info, option, needed=False)
        if not (reason := _hold(other, spec)):
            others.append(other)
        elif not spec.join:  # --join is not refused: the lock may be of the same run, under another address
            _refuse(others, other, spec, reason)
    if lock and (reason := _hold(lock, spec)):
        _refuse(others, lock, spec, reason)
    return others, lock


def _refuse(held: Sequence[FolderLock], taken: FolderLock, spec: LaunchSpec, reason: str) -> NoReturn:
    for lock in held:
        lock.end(REFUSED, reason)
    raise _in_use(taken, spec, reason)


def _hold(lock: FolderLock, spec: LaunchSpec) -> str | None:
    """Take the lock (node 0), check it (other nodes) or join the run that holds it (--join).

    Return None, or the reason why the folder cannot be used.
    """
    if spec.join:
        return lock.join(spec.run_id)
    return lock.check() if spec.node_rank > 0 else lock.take()


def _in_use(lock: FolderLock, spec: LaunchSpec, reason: str) -> arguments.UsageError:
    if not lock.continued:
        return arguments.UsageError([reason])
    coordinators = f"$(recover-status {shlex.quote(str(spec.log_dir))} --coordinators)" if spec.log_dir else ""
    return arguments.UsageError([continues_without(spec, reason, coordinators)], code=LEFT_OUT)


def _check_secret(spec: LaunchSpec) -> list[str]:
    """Return the reason if the user's secret is not valid, or is missing although the run needs one.

    Only the user can give several nodes a common secret: their launchers cannot generate one.
    """
    if not spec.has_secret:
        missing = f"a run on several nodes needs a shared secret: {SHARE_A_SECRET}"
        if spec.join:
            missing = f"--join needs the secret of the run: {SHARE_A_SECRET}"
        return [missing] if spec.fault_tolerant else []
    try:
        spec.secret()
    except SecretError as error:
        return [str(error)]
    return []
