"""Assembly of --recover in one worker: the hooks installed before Megatron starts, and the exit of the worker.

install()   wraps the functions of Megatron (groups, data, training); raises UserError for an unknown Megatron
run(call)   calls Megatron's pretrain().  The way in which pretrain() ends decides what this worker does:

    returns, or exits with 0        the training is over, and the worker leaves (`endings`: an early end is an error)
    Orphaned, or the replica's      outside train() the worker is a spare until the run ends (inside train(), `training`
      communication failed            catches the error, and the worker waits for another place)
    OtherPosition                   the run needs this spare in another position: the worker drops its model and calls
                                      pretrain() again for that position, without other workers
    NoReplica, StateLost,           the run has ended; each of these errors has its own exit code
      CoordinatorLost, RunOver
    Fenced                          this worker was evicted: exit code 13
    any other exception             a fault of this worker, which logs the traceback and sends it to the coordinator.
                                      After a CUDA error, even of an orphan, the process exits within seconds

A newcomer (a hot spare, a restarted or an added worker) begins as a spare without a model.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from megatron.training import get_args

from recover_megatron import hostdevice, program, script_flags, variables
from recover_megatron.arguments import RecoverConfig, own_domains, parse_addresses
from recover_megatron.chaos.spec import InjectedExit, InjectedFault, Injector, parse_spec
from recover_megatron.collectives import torch_nccl
from recover_megatron.errors import UserError, traceback_wanted
from recover_megatron.instep.decision import Rules
from recover_megatron.instep.faults import (
    EXIT_REFUSED,
    CheckpointFailed,
    Drained,
    NoReplica,
    OtherPosition,
    RunOver,
    StateLost,
    UnknownOperation,
    break_device,
    exit_soon,
    in_short,
    is_communication,
    is_of_device,
    is_own,
    signature,
)
from recover_megatron.instep.manager import CommunicationConfig, Manager, Worker
from recover_megatron.integrate import Loop
from recover_megatron.logger import get_logger, write_stderr
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.checkpoint import checkpoint_writers
from recover_megatron.megatron_hooks.checkpoint.checkpoint_writers import WriterKilled
from recover_megatron.megatron_hooks.data import children
from recover_megatron.megatron_hooks.data import source as data
from recover_megatron.megatron_hooks.entry.endings import NO_DATA, EndedEarly, check_exit_was_asked_for
from recover_megatron.megatron_hooks.layout import optimizer_instances, spreads_optimizer
from recover_megatron.megatron_hooks.logging import writers
from recover_megatron.megatron_hooks.logging.records import Records
from recover_megatron.megatron_hooks.loop.megatron_lm import MEGATRON_LM
from recover_megatron.megatron_hooks.loop.rejoin import build_elsewhere, install_building_alone
from recover_megatron.megatron_hooks.loop.training import TrainingHooks
from recover_megatron.megatron_hooks.loop.turning_points import FaultInjection, TurningPoints
from recover_megatron.megatron_hooks.monkeypatch import has_hooks
from recover_megatron.megatron_hooks.parallel_groups import Groups, grid_of
from recover_megatron.membership.io.session import EXCEPTION_REPORT_SECONDS, connect, is_newcomer, worker_id
from recover_megatron.membership.records import (
    EXIT_FENCED,
    EXIT_NO_REPLICA,
    EXIT_SAME_FAULT,
    EXIT_STATE_LOST,
    CoordinatorLost,
    Fenced,
    SecretError,
    Settings,
)
from recover_megatron.membership.wire import find_secret
from recover_megatron.network.peer_store import PeerStoreServer
from recover_megatron.variables import HOST_VARIABLE, NODE_NAME_VARIABLE, NODE_VARIABLE, REPLACED_VARIABLE
from recover_megatron.workload import domains
from recover_megatron.workload.grid import LaunchGrid, Slot

log = get_logger(__name__)

NO_COORDINATOR = (
    "--recover needs a coordinator: start the workers with recover-run, which starts one, or start "
    "recover-coordinator and pass --recover-coordinator HOST:PORT"
)

LAUNCHER_STOP_SECONDS = 4.0
"""Seconds within which a launcher stops all its workers if any worker is lost before the training has begun."""
OF_ONE_WORKER = (InjectedFault, InjectedExit, KeyboardInterrupt, WriterKilled, data.LoaderKilled)
"""Types of errors that another worker would not repeat on the same microbatch, because their cause is one worker."""


def survive(
    config: RecoverConfig, call: Callable[[], None], arguments: Callable[[], Any], loop: Loop = MEGATRON_LM
) -> None:
    """Train to the end with --recover: call ``FaultTolerance.install``, then ``FaultTolerance.run``."""
    recover = FaultTolerance(config, loop)
    recover.install()
    recover.run(call, arguments)


class FaultTolerance:
    """Creates the parts of --recover in one worker, and maps every way in which the worker ends to an exit code."""

    def __init__(self, config: RecoverConfig, loop: Loop = MEGATRON_LM) -> None:
        if config.coordinator is None or "RANK" not in os.environ:
            raise UserError(NO_COORDINATOR)
        self._config, self._loop = config, loop
        self._may_differ = config.may_differ.split(",")
        self._code = {} if program.FLAG in self._may_differ else program.describe()
        self._me = worker_id()
        self._newcomer = is_newcomer()
        ports = {int(os.environ["MASTER_PORT"]), *(port for _, port in parse_addresses(config.coordinator))}
        self._device = _device()
        self._groups = Groups(
            Slot(int(os.environ["RANK"])), ports, self._device, alone=self._newcomer, most=config.max_replicas
        )
        self._records = Records(config.log_dir)
        self._training = TrainingHooks(
            loop,
            self._groups,
            self._make_manager,
            self._records,
            self._device,
            config,
        )
        breaks = partial(break_device, self._device) if self._device.type == "cuda" else None
        injector = Injector(parse_spec(config.inject) if config.inject else [], self._me, breaks)
        self._faults = FaultInjection(injector, self._training) if injector.active else None
        self._turning_points = TurningPoints(
            self._groups, self._training, self._records, self._faults, not self._newcomer
        )
        self._progress_log = writers.ProgressLog(lambda: self._groups.apart)
        self._session = self._connect()

    def install(self) -> None:
        """Wrap functions of the training loop and Megatron-Core; raises UserError if their signatures are unknown."""
        if reasons := [*self._loop.refusals(), *monkeypatch.misfits(monkeypatch.SEAMS)]:
            raise UserError(*reasons)
        if reasons := variables.refusals(os.environ):
            raise UserError("; ".join(reasons))
        for line in variables.overrule(os.environ):  # recover-run does this for the workers that it starts
            log.warning(line)
        torch.distributed.set_debug_level_from_env()
        if self._device.type == "cuda" and (against := torch_nccl.set_environment(self._config.hang_timeout)):
            log.warning(
                f"{', '.join(against)}: with these environment variables torch may terminate or block a worker that "
                "--recover could have kept; unset them (docs/gpu.md)"
            )
        children.install()
        self._groups.install(self._loop)
        data.install(self._loop)
        self._training.install()
        checkpoint_writers.watch.seconds = self._config.hang_timeout
        install_building_alone(self._groups, self._loop)
        self._progress_log.install(self._loop)
        if self._faults is not None:
            self._faults.install()
        has_hooks()

    def run(self, call: Callable[[], None], arguments: Callable[[], Any]) -> None:
        """Train to the end and return; if the training ends in another way, exit the process or raise UserError.

        ``call``: function that calls Megatron's pretrain().  ``arguments``: function that parses Megatron's flags; a
        newcomer needs them while it waits for a place.
        """
        try:
            self._train_wherever_wanted(call, arguments)
            if self._training.begun:
                self._training.manager.finish()
                self._training.manager.log("end")
                self._records.close()
                writers.finish()
                self._progress_log.finish()
                data.finish()
            else:  # a signal requested the exit before the training began
                self._session.leave()
        except UserError:
            raise
        except BaseException as error:  # noqa: BLE001  the boundary of the worker: maps every exception to an exit code
            self._ended_by(error)

    def _train_wherever_wanted(self, call: Callable[[], None], arguments: Callable[[], Any]) -> None:
        wanted: OtherPosition | None = None
        if self._newcomer:
            try:
                self._wait_for_a_position(arguments())
            except OtherPosition as other:
                wanted = other
        while True:
            if wanted is not None:
                self._build_for(wanted.position)
            try:
                call()
            except OtherPosition as other:
                wanted = OtherPosition(other.position)  # without the traceback, whose frames hold the model
                continue
            except SystemExit as exit_:
                if exit_.code not in (0, None):
                    raise
                check_exit_was_asked_for(exit_, self._loop)
            else:
                if not self._training.begun:
                    raise EndedEarly(NO_DATA)
            return

    def _wait_for_a_position(self, args: Any) -> None:
        grid = grid_of(args, int(os.environ["WORLD_SIZE"]), self._config.max_replicas)
        self._training.open(args, grid)
        self._records.joined_late()
        log.info(f"worker {self._me} waits for a place")
        self._training.manager.wait_for_place()

    def _build_for(self, position: int) -> None:
        """Drop this worker's model, and make the next pretrain() build one for ``position``, without other workers."""
        built = not self._newcomer or self._training.state is not None
        if built:
            self._training.forget()
        build_elsewhere(self._training.manager, self._groups, self._loop, position, built=built)

    # ---- the end of the worker

    def _ended_by(self, error: BaseException) -> NoReturn:
        manager = self._training.manager if self._training.begun else None
        begun = manager is not None and manager.view.started
        for kind, code in ((NoReplica, EXIT_NO_REPLICA), (StateLost, EXIT_STATE_LOST), (UnknownOperation, 1)):
            if isinstance(error, kind):
                self._end(code, f"the run ends: {error}")
        if isinstance(error, Drained):
            self._end(0, f"worker {self._me} exits, and the run continues: {error}")
        if isinstance(error, RunOver) and error.code == EXIT_REFUSED:
            self._end(error.code, f"worker {self._me} exits, and the run continues without it: {error}")
        if isinstance(error, RunOver):
            self._end(error.code, f"the run has ended; spare worker {self._me} exits: {error}")
        if isinstance(error, Fenced):
            _end(EXIT_FENCED, f"worker {self._me} was evicted, and the run continues without it: {error}")
        if isinstance(error, CoordinatorLost):
            if error.reported and error.by is None and error.code == EXIT_NO_REPLICA and not (begun or self._newcomer):
                self._wait_to_be_ended()
            self._end(error.code, f"the run ends for worker {self._me}: {error}")
        # After a loss in the replica, an orphan's main thread may raise any error.
        if manager is not None and self._training.state is not None and self._training.replica_broken(error):
            self._be_spare(manager, error)
        if broken := is_of_device(error):
            exit_soon()
        if isinstance(error, EndedEarly) and not begun:
            _end(1, f"worker {self._me} exits: {error}; the output above may show the reason")
        connection_ended = not begun and (is_communication(error) or isinstance(error, torch.distributed.DistError))
        if connection_ended:
            self._wait_to_be_ended()
        text = "".join(traceback.format_exception(error))
        in_words = isinstance(error, CheckpointFailed) and error.to_folder and not traceback_wanted()
        if not in_words:
            write_stderr(text)
        if connection_ended:
            # The failure is not this worker's fault, so the run may be restarted.
            lost = "lost its connection to another worker before the training began"
            _end(EXIT_NO_REPLICA, f"worker {self._me} {lost} ({signature(error)[:200]}); its traceback is above")
        if begun:
            assert manager is not None
            view = manager.view
            self._session.report_exception(
                self._training.iteration,
                view.microbatch,
                signature(error),
                text,
                view.replica,
                phase=view.phase,
                tried=view.tried,
                own=is_own(error)
                # Another worker's death may cause a CUDA error: kernels are aborted, or memory they read is unmapped.
                or (broken and (view.orphaned or self._session.revoked))
                or any(isinstance(each, OF_ONE_WORKER) for each in (error, error.__cause__)),
            )
            if isinstance(error, CheckpointFailed) and len(view.decision.replicas) == 1:
                self._session.give_up(EXIT_SAME_FAULT, str(error))  # no other replica can try to save the checkpoint
                with suppress(CoordinatorLost, Fenced):
                    self._session.wait_revoked(EXCEPTION_REPORT_SECONDS)
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            _end(error.code, f"worker {self._me} exits with {error.code}")
        if in_words:
            _end(1, f"worker {self._me} exits: {error} (RECOVER_TRACEBACK=1 shows the traceback)")
        whose = "a CUDA error: its device or CUDA context is broken" if broken else "an exception"
        _end(1, f"worker {self._me} exits after {whose} ({signature(error)[:200]}); its traceback is above")

    def _wait_to_be_ended(self) -> None:
        """Wait for the launcher's SIGTERM, because a worker was lost before the training could begin.

        A launcher logs the loss in one line.  Messages of all workers that lost a connection would hide this line, so
        this worker logs nothing while it waits.  If no SIGTERM arrives within ``LAUNCHER_STOP_SECONDS``, the method
        returns.  If the coordinator ends this worker, the process waits again, and exits with EXIT_NO_REPLICA.
        """
        try:
            self._session.wait_lost((), LAUNCHER_STOP_SECONDS)
        except (CoordinatorLost, Fenced) as out:
            threading.Event().wait(LAUNCHER_STOP_SECONDS)
            _end(EXIT_NO_REPLICA, f"worker {self._me} exits: {out}")

    def _be_spare(self, manager: Manager, error: BaseException) -> NoReturn:
        reason = in_short(error)
        manager.leave(error)
        # Drop the traceback: its frames hold tensors, and connections that other workers expect to be closed.
        error.__traceback__ = None
        self._groups.left(manager)
        log.info(f"worker {self._me} has lost its place ({reason}); it waits as a spare")
        try:
            # The training is over for this worker, which has no position to return to.
            manager.wait_for_place(position=None, ready=False)
        except RunOver as over:
            self._end(over.code, f"the run has ended; spare worker {self._me} exits: {over}")
        raise AssertionError("a worker that cannot come back was given a place")

    def _end(self, code: int, message: str) -> NoReturn:
        """Write the remaining lines of this worker's records, log ``message``, and exit with ``code``.

        A worker that is evicted or fails calls the function ``_end`` instead: the next writer has its lines.
        """
        self._records.close()
        _end(code, message)

    # ---- creating the parts

    def _connect(self) -> Any:
        config = self._config
        assert config.coordinator is not None  # __init__ refuses None
        try:
            return connect(Settings.of(config), addresses=parse_addresses(config.coordinator))
        except (SecretError, ValueError) as error:
            raise UserError(f"--recover: {error}") from None

    def _make_manager(self, args: Any, grid: LaunchGrid | None) -> Manager:
        """Create the manager.  A newcomer, which has not initialized Megatron yet, passes ``args`` and ``grid``."""
        config = self._config
        args, grid = args or get_args(), grid or self._groups.grid
        secret, host = find_secret(os.environ).key("ring"), _my_address()
        comm_config = CommunicationConfig(
            peer_store=PeerStoreServer(host, secret),
            secret=secret,
            device=self._device,
            host=host,
            collective="native" if self._device.type == "cuda" and config.collective != "ring" else "ring",
            hook=None if self._faults is None else self._faults.in_collective,
        )
        node = os.environ.get(NODE_NAME_VARIABLE) or os.environ.get(NODE_VARIABLE) or socket.gethostname()
        spread, instances = spreads_optimizer(args), optimizer_instances(args)
        interleaved = (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) > 1
        worker = Worker(
            self._me,
            None if self._newcomer else Slot(int(os.environ["RANK"])),
            node=node,
            domains=domains.names(node, own_domains(config.domain), os.environ),
            device=int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None,
            flags={**script_flags.flags_of(sys.argv[1:], self._may_differ), "recover_megatron": program.VERSION},
            code=self._code,
        )
        rules = Rules(
            args.pipeline_model_parallel_size if interleaved else 1,
            config.allow_cross_node_tp,
            strict=config.verify_interval > 0,
            spread=spread,
            replaced=REPLACED_VARIABLE in os.environ,
            min_replicas=config.min_replicas,
            # Number of shards of the optimizer's state if every optimizer instance has a copy of each, otherwise 0.
            shards=grid.launched // instances if spread and instances > 1 else 0,
            holders=1 + config.shadow_shards if instances == 1 else instances,
            placed=instances == 1,
            memory=config.memory_tier,
            memory_interval=config.memory_interval,
            spares=config.spares,
        )
        return Manager(self._session, worker, grid, comm_config, self._turning_points, rules, config.verify_interval)


def _device() -> torch.device:
    """Return this worker's device, with its index, because in other threads torch's default is the first GPU.

    Megatron chooses the same index, but a newcomer needs the device before it initializes Megatron.
    """
    if hostdevice.is_active():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _my_address() -> str:
    """Return the address at which other workers reach this worker.

    The launcher gives the address in the environment.  Without a launcher it is the local address of a connection to
    the rendezvous store, whose host may be gone when a newcomer joins.
    """
    if address := os.environ.get(HOST_VARIABLE):
        return address
    store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(store, timeout=60) as connection:
        return str(connection.getsockname()[0])


def _end(code: int, message: str) -> NoReturn:
    """Log ``message`` and exit with ``code``, without Python's cleanup, which could wait forever for dead workers."""
    log.info(message)
    sys.stdout.flush()
    os._exit(code)
