"""Start many Megatron runs for the price of one import.

A server process imports torch and Megatron (on the host device) and then forks the workers of one run after another, as
it is told: one JSON request a line on stdin, one JSON answer a line on stdout.  The server itself starts no thread and
no process group; a run's rendezvous store lives in a child of its own.

    client (pytest) --request--> server --fork--> the run  --fork--> store, coordinator (with --recover)
                                                           --fork--> worker 0 .. N-1   RANK etc., a log file, the script
                                                  waits for all workers; when one fails, ends the others; with --recover
                                                  it is their node agent instead, as recover-run is, and may start
                                                  others
                    <--answer---

Worker ids with --recover: the launch has 0 .. N-1, then come the spares, N .. N+S-1; the k-th worker that was started
in place of another (k = 0, 1, ..) is N+S+k. No id is used twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import REPOSITORY
from tests.harness.patience import patient

FEW_DOCUMENTS = 1000


@dataclass
class Run:
    """What a finished run left: exit codes by rank (negative: signal), and its logs.

    ``more``: the exit codes of the workers that were not launched with the run, by worker id.
    """

    codes: list[int]
    logs: list[Path]
    more: dict[int, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not any(self.codes) and not any(self.more.values())

    def tail(self, lines: int = 15) -> str:
        """The end of the log of the first worker that failed, for an assertion's message."""
        failed = [log for code, log in zip(self.codes, self.logs, strict=True) if code > 0] or self.logs
        return f"codes {self.codes}, {failed[0]}:\n" + "\n".join(failed[0].read_text().splitlines()[-lines:])


class ForkServer:
    """The client's side; use as a context manager."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        workers: int,
        argv: list[str],
        log_dir: Path,
        *,
        environment: dict[str, str] | None = None,
        losses: Path | None = None,
        training: Path | None = None,
        timeout: float = 300,
        together: bool = True,
        spares: int = 0,
        restarts: int = 0,
        nodes: list[str] | None = None,
        networks: list[tuple[str, str]] | None = None,
        documents: int = FEW_DOCUMENTS,
        lingering: bool = False,
    ) -> Run:
        """Run ``argv`` (script first) in ``workers`` processes and wait for all of them.

        When one fails the others are killed, unless ``together`` is False: then each ends as it will.  A run with
        ``--recover`` among its arguments gets a coordinator, and its workers end as they will.

        ``timeout``: in seconds of an idle machine; then all that is left is killed.

        With ``losses`` the last rank writes what its train_step returned, one JSON line an iteration, to that file.
        With ``training`` every worker that trains to the end writes its parameters, and the losses of its evaluations,
        to WORKER.pt in that folder.

        With ``--recover``: ``spares`` more workers are started with the run, and one in place of each that is killed or
        fails, ``restarts`` in all; they find RECOVER_WORKER_ID (their id), RECOVER_JOIN=1 and, the spares,
        RECOVER_SPARE=1 in their environment, the rank and local rank of the one they replace (spares: rank 0), and have
        logs of their own, worker-ID.log. ``nodes``: the name of each rank's node, for RECOVER_NODE_NAME (default: all
        "node"); spares are on the last one, replacements on that of the one they replace. Who is in no plan when the
        run ends is killed.

        A death is told to the coordinator as recover-run tells it, before the process has gone; only when it has gone
        with BENCH_TELL=pidfd in ``environment``.

        ``networks``: (file of a network namespace, address there) of each rank, and behind them that of the store and
        the coordinator (tests/hosts).

        ``documents``: of Megatron's mock data. Its own number is 100,000, whose index takes each worker half a second;
        a run is comparable only with one that has as many.

        ``lingering``: with ``--recover``: a worker that stops itself counts as dead, and its connections stay open
        until all others have ended (``server._wait_for_all``).
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for folder in (log_dir, training or log_dir):
            folder.mkdir(parents=True, exist_ok=True)
        request = {
            "workers": workers,
            "argv": argv,
            "log_dir": str(log_dir),
            "environment": environment or {},
            "losses": str(losses) if losses else None,
            "training": str(training) if training else None,
            "timeout": patient(timeout),
            "together": together,
            "spares": spares,
            "restarts": restarts,
            "nodes": nodes or ["node"] * workers,
            "networks": networks,
            "documents": documents,
            "lingering": lingering,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server died"
        codes = {int(worker): code for worker, code in json.loads(answer)["codes"].items()}
        logs = [log_dir / f"worker-{rank}.log" for rank in range(workers)]
        return Run([codes.pop(rank) for rank in range(workers)], logs, codes)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(patient(60))
