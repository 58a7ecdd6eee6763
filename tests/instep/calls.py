"""The calls of the package's functions that a worker makes while it trains: recorded, for what docs say of them."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tests.harness import REPOSITORY

PACKAGE = str(REPOSITORY / "recover_megatron") + "/"


class Call(NamedTuple):
    """One call; ``parent``: the number of the call of the package's that was under way in its thread, -1: none."""

    thread: str
    parent: int
    file: str
    """Below the package."""
    function: str
    """With its class; of one inside a function its own name alone."""


class Recorder:
    """Records the calls of all threads that are started after it was installed, and of the one that installs it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._calls = dict[int, Call]()
        self._under_way = dict[int, list[tuple[int, int]]]()
        """Of each thread: (frame, number) of the calls that have not returned."""

    def install(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        under_way = self._under_way.setdefault(threading.get_ident(), [])
        if event == "return":
            if under_way and under_way[-1][0] == id(frame):
                under_way.pop()
            return
        number, parent = next(self._numbers), under_way[-1][1] if under_way else -1
        under_way.append((id(frame), number))
        name = code.co_qualname.rpartition("<locals>.")[2]
        file = code.co_filename.removeprefix(PACKAGE)
        self._calls[number] = Call(threading.current_thread().name, parent, file, name)

    def write(self, path: Path) -> None:
        calls = self._calls.copy()
        whole = itertools.takewhile(calls.__contains__, itertools.count())
        path.write_text(json.dumps([calls[number] for number in whole]))


def record(worker: str, out: str) -> None:
    """Have a worker write its calls to the file ``out`` when its training is over."""
    if os.environ["RANK"] != worker:
        return
    from recover_megatron.instep.manager import Manager

    recorder, finish = Recorder(), Manager.finish

    def finish_when_written(self: Manager) -> None:
        recorder.write(Path(out))
        finish(self)

    Manager.finish = finish_when_written  # type: ignore[method-assign]
    recorder.install()


def read(path: Path) -> list[Call]:
    return [Call(*call) for call in json.loads(path.read_text())]
