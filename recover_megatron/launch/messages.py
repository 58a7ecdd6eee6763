"""Messages of recover-run, as constants and pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.nodes.addresses import join_addresses
from recover_megatron.launch.workers.dying import WRITES_CORE, Ending
from recover_megatron.launch.workers.states import WorkerProcess, WorkerState, signal_name
from recover_megatron.membership.records import ranges
from recover_megatron.variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE

SHARE_A_SECRET = (
    f"set {SECRET_VARIABLE} (16 random characters or more) or {SECRET_FILE_VARIABLE} (a file of mode 0600), with the "
    "same secret on every node"
)


NO_CONTROL_PLANE = f"this run has no coordinator, because its nodes share no secret; to get one, {SHARE_A_SECRET}"


def opening(spec: LaunchSpec) -> str:
    if spec.coordinators:
        return (
            f"joining the run of {join_addresses(spec.coordinators)} with "
            f"{count(spec.nproc_per_node)} on {spec.host}, log dir {spec.log_dir or 'none (--log-dir)'}"
        )
    node = f" (node {spec.node_rank} of {spec.nnodes})" if spec.nnodes > 1 else ""
    without = f", {spared(spec, spec.without).strip()}" if spec.without else ""
    return (
        f"starting {count(spec.local_world_size)} on {spec.host}{node}{without}, "
        f"store {spec.master_addr}:{spec.master_port}, "
        f"log dir {spec.log_dir or 'none (--log-dir)'}"
    )


def worker_ended(
    worker: WorkerProcess,
    others: int | None,
    left_behind: int,
    successor: WorkerProcess | None,
    killed: int,
    cause: str = "",
    *,
    tests_device: bool = False,
) -> str:
    """Return the log line about the end of ``worker`` and its consequences.

    ``others``: number of workers that continue on this host (None: all are being stopped); ``left_behind``: number
    of the worker's processes that were killed after its end; ``successor``: its replacement; ``killed``: number of
    evicted workers that are being killed; ``cause``: explanation of the end, may be empty.
    """
    how, swept = _outcome(worker) + (f" ({cause})" if cause else ""), _swept(left_behind)
    if worker.state is WorkerState.FINISHED:
        return f"worker {worker.worker_id} {how}{swept}"
    if others is None:
        return f"{_name_of(worker)} {how} after {seconds(worker)}{swept}; {_log(worker)}"
    now = f"the other {count(others)} here continue" if others > 1 else "the other worker here continues"
    if others == 0:
        now = "no worker is left on this host" if killed == 0 else "no worker on this host continues"
    if killed:
        now += f"; {count(killed)} more {'is' if killed == 1 else 'are'} being killed"
    if successor is not None:
        tested = " if its device passes a test" if tests_device else ""
        now += f"; worker {successor.worker_id} is started in its place{tested}"
    return f"{_name_of(worker)} {how} after {seconds(worker)}{swept}; {now}; {_log(worker)}"


def writes_core(worker: WorkerProcess, end: Ending) -> tuple[str, str]:
    """Return two texts about a worker whose core is being written: the log line, and the note in workers.json."""
    how = signal_name(-end.code) if end.code else "a fatal signal"
    device = "its device is free after that"
    return (
        f"{_name_of(worker)} was killed by {how}, and the kernel writes its core: the run continues without it; "
        f"{device} (see ulimit -c and kernel.core_pattern for where cores are written); {_log(worker)}",
        f"{WRITES_CORE} ({how}); {device}",
    )


def fenced(worker: WorkerProcess) -> tuple[str, str]:
    """Return two texts about a worker without a death-notice thread: the log line, and the note in workers.json."""
    why = "its process had executed another program, or its thread recover-death-notice had ended"
    return f"{_name_of(worker)} counts as dead and was killed: {why}; {_log(worker)}", f"killed: {why}"


def prepared_ended(process: WorkerProcess, cause: str) -> str:
    """Return the log line about a prepared process that has ended by itself; ``cause``: see ``cause_of``."""
    why = f" ({cause})" if cause else ""
    return (
        f"process {process.pid} on {process.host}, prepared to be worker {process.worker_id}, {_outcome(process)} "
        f"after {seconds(process)}{why}; {NOT_PREPARED}; {_log(process)}"
    )


def not_prepared(process: WorkerProcess, why: str) -> str:
    return f"no process can be prepared to be worker {process.worker_id} on {process.host} ({why}); {NOT_PREPARED}"


def fork_server_ended(process: WorkerProcess, cause: str) -> str:
    """Return the end of the fork server in words; ``cause``: see ``cause_of``."""
    why = f" ({cause})" if cause else ""
    return f"the fork server, process {process.pid}, {_outcome(process)} after {seconds(process)}{why}"


def forks_no_worker(server: WorkerProcess, why: str) -> str:
    """Return the log line about a fork server that cannot fork workers."""
    return f"{server.host}: {why}; from now on each worker is a new process, which imports the program itself"


NOT_PREPARED = "the run goes on, and the next replacement starts without preparation"


def failed_alike(number: int, words: str, successor: WorkerProcess | None, wait: float) -> str:
    why = f"{number} replacement workers have ended in the same way, one after the other"
    then = "no further worker is started; the last replacement of --max-restarts is reserved for another cause"
    if successor is not None:
        then = f"worker {successor.worker_id} is started in {wait:g} s"
    return f"{why} ({words[:200]}): {then}"


def worker_lost_at_start(worker: WorkerProcess, left_behind: int, cause: str) -> str:
    """Return the log text about a worker lost before the training began.

    ``cause``: last line of the worker's output if that may explain the loss, else empty.
    """
    why = f" ({cause})" if cause else ""
    return f"{_name_of(worker)} {_outcome(worker)} after {seconds(worker)}{why}{_swept(left_behind)}; {_log(worker)}"


def spared(spec: LaunchSpec, without: Sequence[int]) -> str:
    """Return the last part of a log line: the nodes that a start leaves out, and the worker ids that spares get."""
    places = ranges(sorted(node * spec.nproc_per_node + n for node in without for n in range(spec.nproc_per_node)))
    return f" without node {', '.join(map(str, without))}, spares of node {spec.nnodes - 1} as workers {places}"


def _name_of(worker: WorkerProcess) -> str:
    return f"worker {worker.worker_id} on {worker.host} (pid {worker.pid})"


def _outcome(worker: WorkerProcess) -> str:
    end = worker.end_in_words
    return {
        WorkerState.FINISHED: "finished",
        WorkerState.FAILED: f"failed with {end}",
        WorkerState.KILLED: f"was {_evicted(worker)}killed by {end}",
    }[worker.state]


def _evicted(worker: WorkerProcess) -> str:
    return f"{EVICTED}, and " if worker.note.startswith(f"{EVICTED}:") else ""


def _swept(left_behind: int) -> str:
    return f"; killed: {count(left_behind, 'process', 'processes')} that it left behind" if left_behind else ""


def _log(worker: WorkerProcess) -> str:
    return f"its log: {worker.log}" if worker.log else "its log: none (set --log-dir)"


def device_failed(worker: WorkerProcess, why: str) -> str:
    """Return the note in workers.json of a worker that was not started, because its device failed the test."""
    return f"not started: the device of local rank {worker.local_rank} failed its test: {why}"


def left_out(worker: WorkerProcess, why: str) -> str:
    """Return the log line about a worker that was not started, because its device failed the test."""
    return (
        f"worker {worker.worker_id} is not started: the device of local rank {worker.local_rank} on {worker.host} "
        f"failed its test ({why}). The run continues without this device; check nvidia-smi -q and dmesg (Xid), reset "
        "or replace it, then add a worker for it with recover-run --join"
    )


CHECKED = (
    "the checks of recover-run have passed; Megatron's own flags, and what --recover refuses or switches off, are "
    "checked when the training starts"
)
EVICTED = "evicted"
"""First word of the note in workers.json of an evicted worker; a colon and the reason follow."""
DRAINING = (
    "this node is being drained: its workers leave the run at the next iteration, and no worker is started here any "
    "more; recover-status shows when the node may be switched off"
)
OWN_FAULT = (
    "this is a bug in recover-run; the workers continue, but lost workers are not replaced from now on. Please report "
    "it with the lines above"
)
STAYS = "the drain of this node is cancelled, because the run needs this node: workers are started here again"
DRAINED_BEFORE_ITS_START = "not started: its node is drained"


TOO_LATE = "the run ended before this worker had joined it"
"""Note in workers.json of a newcomer that was killed because it had no place when the run ended."""


def late(worker: WorkerProcess) -> str:
    return f"the run ended before worker {worker.worker_id} had joined it: killing this worker"


NO_PROCESS_GROUP = (
    "a worker that was not launched with the run cannot call torch.distributed.init_process_group() together with the "
    "other workers: remove the call from the script, or create a group of one process (docs/integrate.md)"
)


def not_joined(worker: WorkerProcess, waited: float) -> str:
    """Return the log line about a newcomer that has run for ``waited`` seconds without a place in the run."""
    place = f" in place of worker {worker.replaces}" if worker.replaces is not None else ""
    return (
        f"worker {worker.worker_id} on {worker.host} was started{place} and has not joined the run for {waited:g} s; "
        f"the run continues without it. If it waits for a process group: {NO_PROCESS_GROUP}; {_log(worker)}"
    )


def how_to_join(spec: LaunchSpec, coordinators: str) -> str:
    return f"more workers may join from other hosts: {_join_command(spec, coordinators)}"


def continues_without(spec: LaunchSpec, why: str, coordinators: str) -> str:
    """Return the log line of a launcher that exits while the run continues without its node.

    ``coordinators``: addresses of the run's coordinators; empty if they are not known.
    """
    text = f"{why}: the run continues without this node"
    if not spec.fault_tolerant or not coordinators:
        return text
    back = "to bring its workers back, run this command, followed by the script and its arguments"
    return f"{text}; {back}: {_join_command(spec, coordinators)}"


def _join_command(spec: LaunchSpec, coordinators: str) -> str:
    return (
        f"recover-run --join --recover-coordinator {coordinators} --world-size {spec.world_size} "
        f"--master-addr {spec.master_addr} --master-port {spec.master_port}"
    )


def no_coordinator_yet(spec: LaunchSpec) -> str:
    return (
        f"no process listens at {join_addresses(spec.coordinators)}, and no run is known to have begun there: waiting "
        f"at most {spec.rendezvous_timeout:g} s (--rendezvous-timeout) for the run's first coordinator"
    )


def no_run_to_join(code: int, reason: str) -> str:
    again = "; to start the run again from its last checkpoint, use the command without --join" if code else ""
    return f"the run that this launcher should join has ended ({reason}): exit code {code}{again}"


def ends(workers: Sequence[WorkerProcess]) -> str:
    """Return one line that reports how all workers have ended, grouped by the kind of end."""
    finished = [worker for worker in workers if worker.state is WorkerState.FINISHED]
    groups: dict[str, list[WorkerProcess]] = {}
    never = [worker for worker in workers if worker.pid is None]
    for worker in sorted(workers, key=lambda worker: worker.ended or 0.0):
        failed = worker.state in (WorkerState.FAILED, WorkerState.KILLED) and worker.note != TOO_LATE
        if failed and worker.pid is not None:
            verb = f"{_evicted(worker)}killed by" if worker.signal is not None else "failed with"
            groups.setdefault(f"{verb} {worker.end_in_words}", []).append(worker)
    late = sum(worker.note == TOO_LATE for worker in workers)
    parts = [f"{len(finished)} of {count(len(workers) - late)} finished"]
    for end, group in groups.items():
        noun = "worker" if len(group) == 1 else "workers"
        after = seconds(group[0]) if len(group) == 1 else f"{seconds(group[0])} and later"
        parts.append(f"{noun} {ranges([worker.worker_id for worker in group])} {end} after {after}")
    if late:
        parts.append(f"{count(late)} more, started as replacements, had not joined the run yet")
    if never:
        parts.append(f"{count(len(never))} never started")
    return "; ".join(parts)


def count(number: int, one: str = "worker", several: str = "workers") -> str:
    return f"{number} {one if number == 1 else several}"


def seconds(worker: WorkerProcess) -> str:
    if worker.started is None or worker.ended is None:
        return "0.0 s"
    return f"{max(0.0, worker.ended - worker.started):.1f} s"
