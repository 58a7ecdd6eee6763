"""Output of the workers: shown on the console with a prefix per line, and kept unchanged in one log file per worker.

Bytes are never decoded.  A line is shown when it is complete; the available part of an incomplete line (a progress bar)
is shown after ``PARTIAL_SECONDS``, and a very long line in pieces of ``LONGEST_LINE`` bytes, so that memory is bounded
and lines of different workers are never mixed.  ``ConsoleFilter`` decides which lines are shown at all.  If the reader
of the launcher's output is slow, the launcher stops reading the workers' pipes for a moment, so that the workers wait;
if the reader reads nothing at all, lines are dropped on the console and kept in the logs (``Sink``).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.launch.workers.dying import FatalError
from recover_megatron.log_writer import LogWriter, open_to_append
from recover_megatron.logger import LineFormat
from recover_megatron.network.event_loop import EventLoop, is_ready

MOST_PENDING = 1024 * 1024
"""Bytes that may wait for the reader of the launcher's output; if more wait, the workers' pipes are not read."""
PAUSE_SECONDS = 2.0
_MOST_AT_ONCE = 64 * 1024


class Sink:
    """Output stream of the launcher, which may be read slowly, later, or never; ``put`` never blocks.

    A thread writes, so that no terminal (Ctrl-S), pipe (``| less``), or file on a hanging file system ever blocks the
    launcher.  The queue is bounded::

        TAKING --more than MOST_PENDING waits--> FULL --only half of it waits--> TAKING
                                                  | after PAUSE_SECONDS (the console calls ``drop``)
                                                  v
                                               DROPPING --only half waits--> TAKING, reports the number of dropped lines

    While the sink is FULL, the workers' pipes are not read, so a slow reader loses nothing.  This lasts at most
    PAUSE_SECONDS, because a worker that blocks in ``print`` hangs.

    ``on_room`` is called, in another thread, when the sink is no longer FULL or DROPPING, or is empty; ``dropped_line``
    returns the line that reports how many lines were dropped.
    """

    def __init__(self, descriptor: int, on_room: Callable[[], None], dropped_line: Callable[[int], bytes]) -> None:
        self._descriptor = descriptor
        self._on_room = on_room
        self._dropped_line = dropped_line
        self._news = threading.Condition()
        self._pending: deque[bytes] = deque()
        self._size = 0
        self._full = self._dropping = self._broken = False
        self._dropped = self._written = 0
        self._thread: threading.Thread | None = None
        self.colour = os.isatty(descriptor) and "NO_COLOR" not in os.environ

    @property
    def empty(self) -> bool:
        """Return whether nothing is left to write, or writing has failed."""
        with self._news:
            return self._broken or not self._pending

    @property
    def full(self) -> bool:
        """Return whether the workers' pipes must not be read now."""
        with self._news:
            return self._full and not self._dropping

    def put(self, data: bytes) -> None:
        """Queue ``data`` (complete lines); drop it if DROPPING, if twice MOST_PENDING waits, or if writing failed."""
        with self._news:
            if self._broken or not data:
                return
            if self._dropping or self._size > 2 * MOST_PENDING:
                self._dropping = self._full = True
                self._dropped += data.count(b"\n")
                return
            self._append(data)
            self._full |= self._size > MOST_PENDING
            if self._thread is None:
                thread = threading.Thread(target=self._write, name="recover-launch-console", daemon=True)
                with contextlib.suppress(RuntimeError):  # the next ``put`` tries to start the thread again
                    thread.start()
                    self._thread = thread
            self._news.notify_all()

    def drop(self) -> None:
        """If the sink is FULL, drop new lines until only half of MOST_PENDING waits."""
        with self._news:
            self._dropping = self._full

    @property
    def written(self) -> int:
        with self._news:
            return self._written

    def _append(self, data: bytes) -> None:
        self._pending.append(data)
        self._size += len(data)

    def _write(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._pending)
                data = self._pending[0]
            try:
                written = os.write(self._descriptor, data[:_MOST_AT_ONCE])
            except BlockingIOError:  # another process has made the terminal non-blocking
                is_ready(self._descriptor, None, select.POLLOUT)
                continue
            except OSError:
                # The reader is gone (closed pipe, lost terminal, full disk).  The run and the logs continue.
                self._break()
                return
            self._count_written(written)

    def _count_written(self, written: int) -> None:
        with self._news:
            first = self._pending.popleft()
            if first[written:]:
                self._pending.appendleft(first[written:])
            self._size -= written
            room = self._full and self._size <= MOST_PENDING // 2
            if room:
                self._full = self._dropping = False
                if self._dropped:
                    self._append(self._dropped_line(self._dropped))
                    self._dropped = 0
            self._written += written
            room |= not self._pending
            self._news.notify_all()
        if room:
            self._on_room()

    def _break(self) -> None:
        with self._news:
            self._broken = True
            self._full = self._dropping = False
            self._pending.clear()
            self._size = 0
            self._news.notify_all()
        self._on_room()


class ConsoleFilter:
    """Filter of a worker's console lines: shows all lines, but only lines of this package until a newcomer has a place.

    While a newcomer builds its model, Megatron prints hundreds of lines about flags and model, which the console has
    shown at the start already.  They are in the newcomer's log.
    """

    OURS = b"recover: "
    PLACED = b" takes position "
    """Part of the line that a newcomer prints when it gets a place."""

    def __init__(self, *, newcomer: bool) -> None:
        self._quiet = newcomer

    def is_shown(self, line: bytes) -> bool:
        """Return whether to show ``line``, the next line of the worker's stdout or stderr."""
        ours = line.startswith(self.OURS)
        if ours and self.PLACED in line:
            self._quiet = False
        return ours or not self._quiet


PARTIAL_SECONDS = 0.5
STALL_SECONDS = 5.0
"""Seconds that the launcher waits before its exit if its output is not read."""
LONGEST_LINE = 64 * 1024
LONGEST_LAST = 300
"""Largest number of bytes that are kept of a worker's last line."""
_READ = 64 * 1024
_MOST_DRAINED = 4 * 1024 * 1024
_MOST_UNWRITTEN = 16 * 1024 * 1024
_COLOURS = (36, 33, 32, 35, 34, 31)


class LogFile(LogWriter):
    """Log of one worker: both streams, without prefix, in order of arrival.

    The file of an earlier run is kept as ``<name>.old``.  A failing disk neither blocks nor terminates the launcher
    (``log_writer``); if the disk works, the data is on it when ``write`` returns.
    """

    def __init__(self, path: Path, say: Callable[[str], None], *, again: bool = False) -> None:
        """Create the file; ``say``, called in any thread, reports a log that cannot be written.

        ``again``: True to append to the file, which this launch has created.
        """
        super().__init__(path, say, self._open, _missing, most_bytes=_MOST_UNWRITTEN)
        self._first = not again
        self.make()
        self._last: tuple[object, bool] = (None, True)

    def write(self, source: object, data: bytes) -> None:
        """Append ``data`` of the stream ``source``, after a newline if the other stream's last line is incomplete."""
        last_source, complete = self._last
        if not complete and last_source is not source:
            data = b"\n" + data
        self._last = (source, data.endswith(b"\n"))
        self.put(data)
        self.wait_done()

    def _open(self, path: Path) -> int:
        """Open the log, after renaming the log of an earlier run; called in the writer's thread."""
        if self._first:
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, path.with_name(path.name + ".old"))
            self._first = False
        return open_to_append(path)


def _missing(pieces: int) -> bytes:
    return f"\nrecover-run: {pieces} pieces of output are missing here: the disk could not write them\n".encode()


@dataclass(eq=False)
class Stream:
    """Output stream of one worker: a pipe that the event loop reads."""

    _console: Console
    pipe: int
    _sink: Sink
    _prefix: bytes
    _log: LogFile | None
    _voice: ConsoleFilter
    _lines: LineFormat
    _name: str
    """Name of the stream: stdout or stderr."""
    fatal: FatalError
    open: bool = True
    wanted: bool = False
    """True if ``Console.read`` was called for this stream, so that the pipe may be read."""
    _held: bytes = b""
    _last: bytes = b""
    _timer: TimerHandle | None = None

    def __post_init__(self) -> None:
        os.set_blocking(self.pipe, False)

    @property
    def last_line(self) -> str:
        """Return the last non-empty line, at most its first LONGEST_LAST bytes."""
        return self._last.decode(errors="replace").strip()

    def forget_last_line(self) -> None:
        """Begin a new ``last_line``: the process that writes becomes a worker now."""
        self._last = b""

    def pause(self) -> None:
        if self.open:
            self._console.loop.remove_reader(self.pipe)

    def resume(self) -> None:
        """Read the pipe from now on whenever there is data, if ``wanted`` is set."""
        if self.open and self.wanted:
            self._console.loop.add_reader(self.pipe, self._read)

    def drain_and_close(self) -> None:
        """Read the data in the pipe, then close the pipe even if another process still holds its writing end."""
        drained = 0
        while self.open and drained < _MOST_DRAINED:
            count = self._read()
            if count == 0:
                break
            drained += count
        self._close()

    def _read(self) -> int:
        """Read the pipe once.  Return the number of bytes; 0: there is no data now, or the stream has ended."""
        try:
            data = os.read(self.pipe, _READ)
        except BlockingIOError:
            return 0
        if data:
            self._take(data)
        else:
            self._close()
        return len(data)

    def _take(self, data: bytes) -> None:
        complete, newline, rest = (self._held + data).rpartition(b"\n")
        self._held = rest
        if newline:
            self._emit(complete + newline)
        while len(self._held) >= LONGEST_LINE:
            self._emit(self._held[:LONGEST_LINE])
            self._held = self._held[LONGEST_LINE:]
        if newline and self._timer:
            self._timer.cancel()
            self._timer = None
        if self._held and self._timer is None:
            self._timer = self._console.loop.call_later(PARTIAL_SECONDS, self._flush_partial)

    def _flush_partial(self) -> None:
        self._timer = None
        if self._held:
            self._emit(self._held)
            self._held = b""

    def _emit(self, data: bytes) -> None:
        """Show and log ``data``, which consists of complete lines or is a piece of a line."""
        lines = data.removesuffix(b"\n").split(b"\n")
        # Text that a progress bar overwrote by a carriage return is not shown; the log has it.
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        self._last = next((line for line in reversed(shown) if line.strip()), self._last)[:LONGEST_LAST]
        self.fatal.take(shown)
        for_people = [line for line in shown if self._voice.is_shown(line)]
        prefix = self._prefix
        if not self._lines.plain:
            now, prefix = time.time(), b""
            data = b"".join(self._lines.line(line, self._name, now) + b"\n" for line in lines)
            for_people = [self._lines.line(line, self._name, now) for line in for_people]
        if self._log:
            self._log.write(self, data)
        self._sink.put(b"".join(prefix + line + b"\n" for line in for_people))
        self._console.check_pressure()

    def _close(self) -> None:
        if self.open:
            self.pause()
            self.open = False
            if self._timer:
                self._timer.cancel()
            self._flush_partial()
            os.close(self.pipe)


class Console:
    """Stdout and stderr of the launcher, and the workers' streams that are shown there."""

    def __init__(
        self, loop: EventLoop, highest_id: int, log_dir: Path | None, form: str = "plain", node: str = ""
    ) -> None:
        """Create the sinks.  ``form``: line format; ``node``: name of this node (both for ``LineFormat``)."""
        self.loop = loop
        self._form = form
        self._node = node
        self._width = len(str(highest_id))
        self._log_dir = log_dir
        self._streams: list[Stream] = []
        self._paused: TimerHandle | None = None
        self._out = Sink(sys.stdout.fileno(), self._on_room, self._dropped)
        self._err = Sink(sys.stderr.fileno(), self._on_room, self._dropped)

    @property
    def flushed(self) -> bool:
        """Return whether all output has been written to the launcher's stdout and stderr."""
        return self._out.empty and self._err.empty

    @property
    def written(self) -> int:
        return self._out.written + self._err.written

    def say(self, text: str) -> None:
        """Print a line of the launcher on stderr."""
        self._err.put(self._own(text))
        self.check_pressure()

    def _own(self, text: str) -> bytes:
        data = f"recover-run: {text}".encode(errors="backslashreplace")
        if self._form != "plain":
            data = LineFormat(self._form, self._node, "-").line(data, "stderr", time.time())
        return data + b"\n"

    def attach(
        self, label: str, colour: int, log: LogFile | None, *, newcomer: bool = False
    ) -> tuple[list[Stream], int, int]:
        """Create the two pipes of a worker.  Return the streams, and the writing ends for stdout and for stderr.

        ``newcomer``: see ``ConsoleFilter``; ignored without a log, because the lines would be lost.  The caller closes
        the two writing ends once the worker has them, and calls ``read`` when the output may be shown.
        """
        streams, ends, voice = [], [], ConsoleFilter(newcomer=newcomer and log is not None)
        lines = LineFormat(self._form, self._node, label)
        for name, sink in (("stdout", self._out), ("stderr", self._err)):
            read, write = os.pipe()
            prefix = self._prefix(label, colour, sink.colour)
            streams.append(Stream(self, read, sink, prefix, log, voice, lines, name, FatalError()))
            ends.append(write)
        self._streams = [stream for stream in self._streams if stream.open] + streams
        return streams, ends[0], ends[1]

    def read(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            stream.wanted = True
            if self._paused is None:
                stream.resume()

    def check_pressure(self) -> None:
        """Pause or resume the workers' streams: they are paused while a sink is full, for PAUSE_SECONDS at most."""
        full = self._out.full or self._err.full
        if full and self._paused is None:
            self._paused = self.loop.call_later(PAUSE_SECONDS, self._stop_waiting)
            for stream in self._streams:
                stream.pause()
        elif not full and self._paused is not None:
            self._paused.cancel()
            self._paused = None
            for stream in self._streams:
                stream.resume()

    def _stop_waiting(self) -> None:
        self._out.drop()
        self._err.drop()
        self.check_pressure()

    def _on_room(self) -> None:
        self.loop.call_from_thread(self.check_pressure)

    def _dropped(self, lines: int) -> bytes:
        kept = f"{self._log_dir} has them" if self._log_dir else "they are lost (no --log-dir)"
        return self._own(f"{lines} lines are missing here, because this output was not read; {kept}")

    def _prefix(self, label: str, colour: int, coloured: bool) -> bytes:
        text = f"[{label}]"
        padding = " " * max(1, self._width + 3 - len(text))
        if coloured:
            text = f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{text}\x1b[0m"
        return (text + padding).encode()


def flush(loop: EventLoop, console: Console, given_up: Callable[[], bool], *, patient: bool) -> None:
    """Wait until all output is written, or nothing was written for STALL_SECONDS; stop early if ``given_up()`` is True.

    If ``patient`` is False, wait at most STALL_SECONDS in total.
    """
    until, written = time.monotonic() + STALL_SECONDS, console.written
    while not (console.flushed or given_up()):
        loop.run_once(until - time.monotonic())
        if time.monotonic() >= until:
            if not patient or console.written == written:
                return
            until, written = time.monotonic() + STALL_SECONDS, console.written
