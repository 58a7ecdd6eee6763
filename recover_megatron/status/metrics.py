"""A run as numbers for Prometheus: families of ``prometheus_client``, made of what ``recover-status`` shows.

docs/metrics.md has the list; names and labels are part of the interface.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from recover_megatron.status.folder import History
from recover_megatron.status.headline import headline
from recover_megatron.status.model import RunStatus

STATES = ("STARTING", "HEALTHY", "DEGRADED", "RECOVERING", "STALLED", "ENDED")
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds, in seconds, of the histogram of recoveries."""


class RunCollector(Collector):
    """What was put in last; nothing before that."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._status: RunStatus | None = None
        self._answers = False

    def registry(self) -> CollectorRegistry:
        """A registry of its own, without what prometheus_client adds of this process."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def put(self, status: RunStatus | None) -> None:
        """None: no coordinator answers; what it said last stays."""
        self._answers = status is not None
        self._status = status or self._status

    def collect(self) -> Iterator[Metric]:
        up = "Whether a coordinator of the run answers."
        yield GaugeMetricFamily("recover_coordinator_up", up, value=float(self._answers))
        if self._status is not None:
            yield from _of_status(self._status)
        yield from _of_history(self._history)


def _of_status(status: RunStatus) -> Iterator[Metric]:
    word = headline(status).word
    state = GaugeMetricFamily("recover_state", "1 for the state that the run is in.", labels=["state"])
    for name in STATES:
        state.add_metric([name], float(name == word))
    yield state
    lost = CounterMetricFamily("recover_workers_lost", "Workers lost.", labels=["cause"])
    for cause, count in sorted(Counter(gone.cause for gone in status.lost).items()):
        lost.add_metric([cause], float(count))
    yield lost
    silences = [worker.silence for worker in [*status.placed, *status.spares] if worker.silence is not None]
    training = status.training
    rows: list[tuple[str, str, float | None]] = [
        ("recover_replicas", "Replicas that run.", len(status.grid)),
        ("recover_replicas_of_launch", "Replicas at the launch.", status.replicas_of_launch),
        ("recover_workers_live", "Workers that live.", status.live),
        ("recover_workers", "All workers that the run has known.", status.world),
        ("recover_spares", "Live workers without a place.", len(status.spares)),
        ("recover_workers_aside", "Workers that are late and may come back.", len(status.aside)),
        ("recover_nodes_draining", "Nodes that are being drained.", len(status.draining)),
        ("recover_worker_silence_seconds", "Longest silence of a live worker.", max(silences, default=None)),
        ("recover_last_step_age_seconds", "Since the last committed decision.", status.commit_age),
        ("recover_exit_code", "Of a run that has ended.", status.code),
    ]
    if training is not None:
        rows += [
            ("recover_iteration", "Last committed iteration.", training.iteration),
            ("recover_train_iterations", "Iterations that the training shall have.", training.train_iters),
            ("recover_loss", "Loss of the last iteration.", training.loss),
            ("recover_iteration_seconds", "Mean of the last iterations.", training.seconds_per_iteration),
            ("recover_samples_per_second", "Over the last iterations.", training.samples_per_second),
            ("recover_tflops_per_gpu", "By Megatron's formula.", training.tflops_per_gpu),
            ("recover_goodput_ratio", "Share of worker time in committed iterations.", training.goodput),
            ("recover_checkpoint_iteration", "Of the last checkpoint.", training.checkpoint),
            ("recover_checkpoint_age_seconds", "Of the last checkpoint.", training.checkpoint_age),
        ]
    for name, text, value in rows:
        if value is not None:
            yield GaugeMetricFamily(name, text, value=float(value))
    if training is not None and status.restarts is not None:
        yield CounterMetricFamily("recover_restarts", "Workers started in place of others.", float(status.restarts))


def _of_history(history: History) -> Iterator[Metric]:
    yield CounterMetricFamily("recover_recoveries", "Losses of replicas that were survived.", float(history.recoveries))
    yield CounterMetricFamily("recover_microbatches_rerun", "Microbatches run again.", float(history.rerun))
    phases = HistogramMetricFamily("recover_recovery_seconds", "Time of recoveries, by phase.", labels=["phase"])
    by_phase: dict[str, list[float]] = {}
    for phase, seconds in history.phases:
        by_phase.setdefault(phase, []).append(seconds)
    for phase, times in sorted(by_phase.items()):
        phases.add_metric([phase], _buckets(times), sum(times))
    yield phases


def _buckets(times: Sequence[float]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    counts = [0] * (len(BUCKETS) + 1)
    for seconds in times:
        counts[bisect_left(BUCKETS, seconds)] += 1
    bounds: Iterable[str] = [*map(str, BUCKETS), "+Inf"]
    return [(bound, float(sum(counts[: n + 1]))) for n, bound in enumerate(bounds)]
