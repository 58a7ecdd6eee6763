"""Operations over replicas that no other worker comes to cost the worker or the thread that makes them, never the run.

Each worker here is a process of its own, forked from the test, with a group over replicas as torch's default group.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from megatron.training.global_vars import _graceful_shutdown

from recover_megatron import out_of_turn
from recover_megatron.instep.faults import UnknownOperation
from recover_megatron.instep.groups.process_group import EpochGroup, register_new
from recover_megatron.instep.groups.traffic import WORLD, Mode, Traffic
from recover_megatron.out_of_turn import OutOfTurn
from recover_megatron.workload.grid import Slot, launch_grid

RUN_ENDED, RETURNED = 70, 71
"""How a worker of a test exits that has ended the whole run, or that nothing has ended."""


def worker(mode: Mode, does: Callable[[], Any]) -> tuple[int, str]:
    """Fork worker 1 of three replicas, and have it do something; how it ended, and what it said on stderr.

    The first is negative where a signal ended it.
    """
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        sys.stdout, sys.stderr = open(os.devnull, "w"), os.fdopen(write, "w", 1)  # noqa: SIM115
        try:
            train(mode)
            does()
        except SystemExit:
            os._exit(RETURNED)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        os._exit(RETURNED)
    os.close(write)
    with os.fdopen(read) as told:
        said = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def train(mode: Mode) -> None:
    """Have a default group over three replicas, in a training that is in this mode."""

    def ends_the_run(*_: Any) -> NoReturn:
        os._exit(RUN_ENDED)

    grid = launch_grid(3, tensor=1, context=1, pipeline=1, inner_ranks=1)
    traffic = Traffic(Slot(1), mode)
    traffic.recovery = SimpleNamespace(  # type: ignore[assignment]
        session=SimpleNamespace(give_up=ends_the_run),
        assignment=SimpleNamespace(started=False, grid=grid, replica=1),
        sections=SimpleNamespace(run=ends_the_run),
        exchange=SimpleNamespace(run=ends_the_run),
    )
    slots = tuple(map(Slot, range(3)))
    register_new(EpochGroup(traffic, None, slots, WORLD), slots, "gloo", default=True)
    out_of_turn.begin()


def handles(handler: Callable[..., Any], number: int = signal.SIGTERM) -> Callable[[], None]:
    """Have this handler called for a signal that comes."""

    def does() -> None:
        signal.signal(number, handler)
        signal.raise_signal(number)

    return does


@pytest.mark.parametrize("mode", [Mode.STARTING, Mode.STEP, Mode.OPEN])
def test_megatrons_handler_that_waits_for_all_workers_ends_its_own_by_the_signal(mode: Mode) -> None:
    """--exit-signal-handler-for-training: wherever the signal has met the main thread, and nobody else is told."""
    ended, said = worker(mode, handles(_graceful_shutdown))
    assert ended == -signal.SIGTERM, said
    assert "global_vars.py" in said
    assert "(_graceful_shutdown)" in said
    assert "in a handler of SIGTERM" in said


def test_a_handler_that_meets_its_worker_in_a_print_ends_it_by_the_signal_all_the_same() -> None:
    def does() -> None:
        sys.stdout = SimpleNamespace(flush=lambda: 1 / 0)  # type: ignore[assignment]
        handles(raise_from_c)()

    assert worker(Mode.STEP, does)[0] == -signal.SIGTERM


def test_a_program_may_train_in_a_thread_of_its_own() -> None:
    def does() -> None:
        signal.signal(signal.SIGUSR1, raise_from_c)  # which can be set in the main thread alone
        thread = threading.Thread(target=begins)
        thread.start()
        thread.join()
        assert ended == [True]

    def begins() -> None:
        out_of_turn._trainer = None
        out_of_turn.begin()
        ended.append(True)

    ended: list[bool] = []
    assert worker(Mode.STEP, does)[0] == RETURNED


def first_gives_up(number: int, frame: Any) -> None:
    """As handlers do that let a second signal end the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise_from_c(number, frame)


def raise_from_c(number: int, frame: Any) -> None:
    max([frame], key=lambda _: dist.barrier())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGRTMIN + 3])
def test_any_handlers_operation_ends_its_worker_alone_by_that_signal(number: int) -> None:
    assert worker(Mode.STEP, handles(first_gives_up, number))[0] == -number


def test_a_handler_of_a_signal_that_ends_nothing_by_itself_ends_its_worker_all_the_same() -> None:
    assert worker(Mode.OPEN, handles(raise_from_c, signal.SIGCONT))[0] == 128 + signal.SIGCONT


def test_a_handler_that_was_set_before_the_training_is_watched_and_is_still_the_one_that_was_set() -> None:
    def does() -> None:
        assert signal.getsignal(signal.SIGUSR2) is raise_from_c
        assert signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2)) is raise_from_c
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, raise_from_c)
    try:
        assert worker(Mode.STEP, does)[0] == -signal.SIGUSR2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_only_notes_its_signal_disturbs_nothing() -> None:
    """As that of Megatron's --exit-signal-handler: operations after it are carried out."""

    def does() -> None:
        noted: list[int] = []
        handles(lambda number, frame: noted.append(number))()
        assert noted == [signal.SIGTERM]
        dist.barrier()

    ended, said = worker(Mode.ALONE, does)
    assert ended == RETURNED, said


def test_an_operation_of_another_thread_costs_that_thread_alone() -> None:
    def does() -> None:
        ends: list[type[BaseException]] = []

        def other() -> None:
            try:
                dist.all_reduce(torch.ones(1))
            except (OutOfTurn, UnknownOperation) as error:
                ends.append(type(error))

        thread = threading.Thread(target=other, name="metrics")
        thread.start()
        thread.join()
        assert ends == [OutOfTurn]

    ended, said = worker(Mode.STEP, does)
    assert ended == RETURNED, said
    assert "in the thread 'metrics'" in said
    assert "test_out_of_turn.py" in said


def test_in_the_thread_that_trains_an_unknown_operation_still_ends_the_run() -> None:
    assert worker(Mode.STEP, dist.barrier)[0] == RUN_ENDED
