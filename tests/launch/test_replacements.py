"""Replacements that fail one after the other by one cause do not use up all that may be started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace

from recover_megatron.launch.workers import successors
from recover_megatron.launch.workers.states import WorkerProcess, WorkerState
from recover_megatron.launch.workers.successors import JOIN_SECONDS, LateNewcomers, Successors
from tests.launch.conftest import spec_of
from tests.launch.test_newcomers import ended


def test_replacements_that_fail_alike_wait_ever_longer_and_the_last_is_kept_for_another_cause():
    plan = spec_of(max_restarts=6)
    replacements = successors.Replacements(plan)
    launched = successors.launched(plan)
    worker, waits = replacements.of(ended(launched[0], -9), 0), []
    for number in range(1, 5):
        worker = replacements.of(ended(worker, 1), 0, f"PermissionError: /data/cache-{number}")
        waits.append(replacements.wait)
    assert waits == [0.0, 30.0, 60.0, 120.0]
    assert replacements.of(ended(worker, 1), 0, "PermissionError: /data/cache-9") is None
    assert replacements.kept
    last = replacements.of(ended(launched[1], -9), 0, "whatever")
    assert (last.replaces, replacements.wait, replacements.kept) == (1, 0.0, False), "another cause, at once"
    assert replacements.of(ended(last, 1), 0, "PermissionError: /data/cache-9") is None
    assert not replacements.kept, "there is none any more"


def test_replacements_that_fail_in_other_words_do_not_wait():
    replacements = successors.Replacements(spec_of(max_restarts=3))
    worker = replacements.of(ended(successors.launched(spec_of())[0], -9), 0)
    for words in ("PermissionError: /data/cache", "RuntimeError: no kernel image"):
        worker = replacements.of(ended(worker, 1), 0, words)
        assert worker is not None
        assert replacements.wait == 0.0


def test_replacements_that_are_killed_before_they_have_a_place_wait_as_those_that_fail():
    plan = spec_of(max_restarts=4)
    replacements = successors.Replacements(plan)
    worker, waits = replacements.of(ended(successors.launched(plan)[0], -9), 0), []
    for _ in range(2):
        worker = replacements.of(ended(worker, -9), 0, "killed by SIGKILL, out of memory", had_place=False)
        waits.append(replacements.wait)
    assert waits == [0.0, 30.0]
    trained = replacements.of(ended(worker, -9), 0, "killed by SIGKILL", had_place=True)
    assert (trained.replaces, replacements.wait) == (worker.worker_id, 0.0), "a death in the training, as any other"


class Played:
    """An event loop and a table, of a launcher whose replacements fail in the same words."""

    def __init__(self, max_restarts: int) -> None:
        self.first_id = 0
        self.last_words = dict.fromkeys(range(20), "PermissionError: /data/cache")
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.said: list[str] = []
        self.started: list[int] = []
        self.ends: list[str] = []
        plan = spec_of(max_restarts=max_restarts)
        self.workers = successors.launched(plan)
        left = lambda: self.ends.append("left")  # noqa: E731
        self.successors = Successors(plan, self, self, self.said.append, self.start, left, lambda worker: {})

    def add(self, workers: Iterable[WorkerProcess]) -> None:
        """Nothing to note."""

    def call_later(self, seconds: float, callback: Callable[..., None], *arguments: object) -> None:
        self.due.append((seconds, partial(callback, *arguments)))

    def start(self, worker: WorkerProcess) -> None:
        worker.pid = worker.worker_id
        self.started.append(worker.worker_id)

    def abandon(self, workers: Iterable[WorkerProcess]) -> None:
        for worker in workers:
            ended(worker, -9)

    def until_one_waits(self, status: int = 1) -> WorkerProcess:
        worker, had_place = ended(self.workers[0], -9), True
        while not self.due:
            successor = self.successors.of(worker, had_place=had_place)
            self.successors.start(successor)
            worker, had_place = successor if self.due else ended(successor, status), False
        return worker


def test_a_replacement_that_waits_is_started_later_and_the_console_says_why():
    played = Played(5)
    waiting = played.until_one_waits()
    assert played.said == [
        "2 replacement workers have ended in the same way, one after the other "
        f"(PermissionError: /data/cache): worker {waiting.worker_id} is started in 30 s"
    ]
    assert played.started == [4, 5]
    ((seconds, begin),) = played.due
    begin()
    assert (seconds, played.started) == (30.0, [4, 5, 6])
    played.successors.run_over()
    assert waiting.live, "it runs: others end it"


def test_of_replacements_that_are_killed_at_their_start_the_console_says_by_what():
    played = Played(5)
    waiting = played.until_one_waits(-9)
    assert played.started == [4, 5]
    assert f"(killed by SIGKILL): worker {waiting.worker_id} is started in 30 s" in played.said[0]


def test_a_replacement_that_waits_does_not_keep_a_launch_whose_run_is_over():
    played = Played(5)
    waiting = played.until_one_waits()
    played.successors.run_over()
    assert not waiting.live
    assert played.ends == ["left"]
    played.due[0][1]()
    assert played.started == [4, 5], "not any more"


def test_the_console_and_the_note_say_which_newcomer_of_the_library_does_not_come():
    plan, due, said, notes = spec_of(elastic=True, max_restarts=3), [], [], {}
    control = SimpleNamespace(agent=SimpleNamespace(planned={0, 1, 2, 3, 5}))
    loop = SimpleNamespace(call_later=lambda *call: due.append(call))
    late = LateNewcomers(plan, loop, SimpleNamespace(note=notes.__setitem__), control, said.append)
    launched, replacements = successors.launched(plan), successors.Replacements(plan)
    workers = [replacements.of(ended(worker, -9), 0) for worker in launched[:3]]
    for worker in [launched[3], *workers]:
        worker.state = WorkerState.RUNNING
        late.started(worker)
    ended(workers[2], 1)
    assert [seconds for seconds, _ in due] == [JOIN_SECONDS] * 3, "the launch's own workers are not newcomers"
    for _, look in due:
        look()
    assert [*notes] == [4], "5 has joined, 6 has ended"
    (line,) = said
    assert line.startswith(
        "worker 4 on h was started in place of worker 0 and has not joined the run for 60 s; the run"
    )
    assert "torch.distributed.init_process_group()" in line
    LateNewcomers(spec_of(max_restarts=3), loop, None, control, said.append).started(workers[0])
    assert len(due) == 3, "Megatron's take longer, and say what they do"
