"""Metrics of a run for Prometheus: families of ``prometheus_client``, from the data that ``recover-status`` shows.

docs/reference/metrics.md lists the metrics; their names and labels are part of the interface.  Every sample has the
label ``run``, since a node may report several runs, in several textfiles or, one after the other, at the same port.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from recover_megatron.status.folder import History
from recover_megatron.status.headline import headline
from recover_megatron.status.model import CAUSES, RunStatus

STATES = ("STARTING", "HEALTHY", "DEGRADED", "RECOVERING", "STALLED", "ENDED")
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds, in seconds, of the buckets of the recovery-time histogram."""
UNNAMED = "ended"
"""Cause that is reported for the loss of a worker if the real cause is unknown."""
ASIDE = "aside"
"""Cause of a recovery after workers were set aside; these workers are live and may come back."""
NAMED_SECONDS = 10.0
"""Seconds to wait for the launcher's report of how a worker ended, after the worker's connection has failed."""


class RunCollector(Collector):
    """Collector of the metrics of the last status passed to ``put``.  ``run``: value of the label ``run``."""

    def __init__(self, history: History, run: str) -> None:
        self._history = history
        self._run = run
        self._status: RunStatus | None = None
        self._answers = False
        # A cause does not change after it was counted, because a counter must not decrease.
        self._causes: dict[int, str] = {}
        """Lost worker's id -> cause."""
        self._recovered: list[str] = []
        """Cause of each recovery, in the order of ``History.recovered``."""

    def registry(self) -> CollectorRegistry:
        """Return a registry with only this collector, without prometheus_client's own metrics of the process."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def put(self, status: RunStatus | None) -> None:
        """Set the status to export.  None if no coordinator answers: the last status is exported again."""
        self._answers = status is not None
        self._status = status or self._status
        if status is not None:
            for gone in status.lost:
                named = gone.cause != UNNAMED or status.code is not None
                if named or gone.ago is None or gone.ago > NAMED_SECONDS:
                    self._causes.setdefault(gone.worker, gone.cause)
        recovered = self._history.recovered
        if len(recovered) < len(self._recovered):
            self._recovered = []
        for at, lost in recovered[len(self._recovered) :]:
            if (cause := self._cause(at, lost)) is None:
                break  # try this recovery and the later ones again at the next ``put``
            self._recovered.append(cause)

    def _cause(self, at: float, lost: Sequence[int]) -> str | None:
        """Return the cause of the recovery that followed the loss of the workers ``lost``; None if not known yet.

        ``at``: monotonic time at which the loss was read from the events.
        """
        if found := {self._causes[worker] for worker in lost if worker in self._causes}:
            return min(found, key=CAUSES.index)
        if self._status is not None and set(self._status.aside) & set(lost):
            return ASIDE
        return UNNAMED if time.monotonic() - at > NAMED_SECONDS or not lost else None

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            family.samples = [sample._replace(labels={**sample.labels, "run": self._run}) for sample in family.samples]
            yield family

    def _families(self) -> Iterator[Metric]:
        up = "1 if a coordinator of the run answers."
        yield GaugeMetricFamily("recover_coordinator_up", up, value=float(self._answers))
        if self._status is not None:
            yield from _of_status(self._status)
        yield _by_cause("recover_workers_lost", "Workers lost.", CAUSES, self._causes.values())
        survived = "Losses of replicas that the run survived."
        yield _by_cause("recover_recoveries", survived, (*CAUSES, ASIDE), self._recovered)
        yield from _of_history(self._history)


def _of_status(status: RunStatus) -> Iterator[Metric]:
    word = headline(status).word
    state = GaugeMetricFamily("recover_state", "1 for the present state of the run.", labels=["state"])
    for name in STATES:
        state.add_metric([name], float(name == word))
    yield state
    silences = [worker.silence for worker in [*status.placed, *status.spares] if worker.silence is not None]
    training = status.training
    running, launched = len(status.grid), status.replicas_of_launch
    if launched is None and status.epoch and status.workers_of_launch is not None:  # the plans name no replicas
        left = sum(gone.fate == "left" for gone in status.gone)
        running, launched = status.live, status.workers_of_launch - left
    rows: list[tuple[str, str, float | None]] = [
        ("recover_epoch", "Epoch of the last plan.", status.epoch),
        ("recover_replicas", "Complete replicas.", running),
        ("recover_replicas_of_launch", "Replicas at launch.", launched),
        ("recover_workers_live", "Live workers.", status.live),
        ("recover_workers", "All workers that the run has had.", status.world),
        ("recover_spares", "Live workers without a place.", len(status.spares)),
        ("recover_workers_aside", "Workers that are set aside: late, but may come back.", len(status.aside)),
        ("recover_nodes_draining", "Nodes that are being drained.", len(status.draining)),
        ("recover_worker_silence_seconds", "Longest silence of a live worker.", max(silences, default=None)),
        ("recover_last_step_age_seconds", "Seconds since the last committed decision.", status.commit_age),
        ("recover_exit_code", "Exit code of a run that has ended.", status.code),
    ]
    if training is not None or (status.epoch and status.iteration):
        iteration = status.iteration if training is None else training.iteration
        rows.append(("recover_iteration", "Last committed iteration, or else the one under way.", iteration))
    if training is None:
        rows.append(("recover_loss", "Loss of the last iteration.", status.loss))
    else:
        rows += [
            ("recover_train_iterations", "Number of iterations of the complete training.", training.train_iters),
            ("recover_loss", "Loss of the last iteration.", training.loss),
            ("recover_iteration_seconds", "Mean seconds of the last iterations.", training.seconds_per_iteration),
            ("recover_samples_per_second", "Samples per second over the last iterations.", training.samples_per_second),
            ("recover_tflops_per_gpu", "TFLOP/s per GPU by Megatron's formula.", training.tflops_per_gpu),
            ("recover_goodput_ratio", "Share of worker time in committed iterations.", training.goodput),
            ("recover_checkpoint_iteration", "Iteration of the last checkpoint.", training.checkpoint),
            ("recover_checkpoint_age_seconds", "Seconds since the last checkpoint.", training.checkpoint_age),
        ]
    for name, text, value in rows:
        if value is not None:
            yield GaugeMetricFamily(name, text, value=float(value))
    if status.restarts is not None and status.world:  # before any worker connects, workers.json may be of another run
        yield CounterMetricFamily("recover_restarts", "Replacement workers started.", float(status.restarts))


def _by_cause(name: str, text: str, causes: Iterable[str], counted: Iterable[str]) -> Metric:
    """Return a counter with a sample for each cause, even if 0: Prometheus sees no increase in a first sample."""
    counts = Counter(counted)
    family = CounterMetricFamily(name, text, labels=["cause"])
    for cause in causes:
        family.add_metric([cause], float(counts[cause]))
    return family


def _of_history(history: History) -> Iterator[Metric]:
    yield CounterMetricFamily("recover_microbatches_rerun", "Microbatches run again.", float(history.rerun))
    phases = HistogramMetricFamily("recover_recovery_seconds", "Time of recoveries, by phase.", labels=["phase"])
    by_phase: dict[str, list[float]] = {}
    for phase, seconds in history.phases:
        by_phase.setdefault(phase, []).append(seconds)
    for phase, times in sorted(by_phase.items()):
        phases.add_metric([phase], _buckets(times), sum(times))
    yield phases


def _buckets(times: Sequence[float]) -> list[tuple[str, float]]:
    """Return (upper bound, number of times up to this bound) for ``BUCKETS`` and "+Inf", as Prometheus expects."""
    counts = [0] * (len(BUCKETS) + 1)
    for seconds in times:
        counts[bisect_left(BUCKETS, seconds)] += 1
    bounds: Iterable[str] = [*map(str, BUCKETS), "+Inf"]
    return [(bound, float(sum(counts[: n + 1]))) for n, bound in enumerate(bounds)]
