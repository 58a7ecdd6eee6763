"""The workers' output: shown with a prefix per line, kept as it came in one log file per worker.

Bytes are never decoded.  A line is shown when it is complete; a line that stays incomplete (a progress bar) is shown as
far as it is after ``PARTIAL_SECONDS``, and a very long one in pieces of ``LONGEST_LINE`` bytes, so that memory is
bounded and lines of different workers are never mixed.  When the reader of the launcher's own output is slow, the
launcher stops reading the workers' pipes, as if they wrote to it directly; it never blocks itself, so deaths and
signals are seen.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from recover_megatron.launch.loop import EventLoop, Timer

PARTIAL_SECONDS = 0.5
LONGEST_LINE = 64 * 1024
_READ = 64 * 1024
_MOST_PENDING = 1024 * 1024
_MOST_DRAINED = 4 * 1024 * 1024
_COLOURS = (36, 33, 32, 35, 34, 31)


class Sink:
    """Writes to one of the launcher's own streams without ever blocking."""

    def __init__(self, loop: EventLoop, descriptor: int, on_progress: Callable[[], None]) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._on_progress = on_progress
        self._pending: deque[bytes] = deque()
        self.size = 0
        """Bytes that wait to be written."""
        self._watched = False
        self._always_ready = False
        self._broken = False
        self.colour = os.isatty(descriptor) and "NO_COLOR" not in os.environ

    @property
    def empty(self) -> bool:
        """Whether everything has been written."""
        return not self._pending

    def put(self, data: bytes) -> None:
        """Write ``data`` as soon as that is possible."""
        if self._broken or not data:
            return
        self._pending.append(data)
        self.size += len(data)
        if not self._watched and not self._always_ready:
            self._watched = self._loop.watch_writable(self._descriptor, self._write_some)
            self._always_ready = not self._watched
        while self._always_ready and self._pending:
            self._write_some()
        self._on_progress()

    def _write_some(self) -> None:
        # A pipe or terminal that is ready takes 4096 bytes (PIPE_BUF) without blocking, not necessarily more.
        most = LONGEST_LINE if self._always_ready else 4096
        data = self._pending.popleft()
        while self._pending and len(data) < most:
            data += self._pending.popleft()
        try:
            written = os.write(self._descriptor, data[:most])
        except BlockingIOError:
            written = 0
        except OSError:
            # Nobody reads any more (closed pipe, lost terminal).  The run goes on, and so do the log files.
            self._broken = True
            self._pending.clear()
            self.size = written = 0
            data = b""
        self.size -= written
        if data[written:]:
            self._pending.appendleft(data[written:])
        if not self._pending and self._watched:
            self._loop.unwatch(self._descriptor)
            self._watched = False
        self._on_progress()


class LogFile:
    """A worker's log: both its streams, unprefixed, in order of arrival, written through at once.

    The file of an earlier run is kept as ``<name>.old``.
    """

    def __init__(self, path: Path, on_error: Callable[[str], None]) -> None:
        self._on_error = on_error
        self._path = path
        if path.exists():
            os.replace(path, path.with_name(path.name + ".old"))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._last: tuple[object, bool] = (None, True)
        self._failed = False

    def write(self, source: object, data: bytes) -> None:
        """Append ``data`` of the stream ``source``; a line that the other stream left incomplete is ended first."""
        last_source, complete = self._last
        if not complete and last_source is not source:
            data = b"\n" + data
        self._last = (source, data.endswith(b"\n"))
        try:
            while data and not self._failed:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self._failed = True
            self._on_error(
                f"log {self._path} cannot be written any more ({error.strerror}); its worker goes on without it"
            )

    def close(self) -> None:
        os.close(self._descriptor)


class Stream:
    """One output stream of one process: a pipe, read by the loop."""

    def __init__(self, console: Console, pipe: int, sink: Sink, prefix: bytes, log: LogFile | None) -> None:
        self._console = console
        self._pipe = pipe
        self._sink = sink
        self._prefix = prefix
        self._log = log
        self._held = b""
        self._timer: Timer | None = None
        self._watched = False
        self.open = True
        self.wanted = False
        """Whether it may be read."""
        os.set_blocking(pipe, False)

    def pause(self) -> None:
        """Stop reading."""
        if self._watched:
            self._console.loop.unwatch(self._pipe)
            self._watched = False

    def resume(self) -> None:
        """Read whenever there is something, once that is wanted."""
        if self.open and self.wanted and not self._watched:
            self._console.loop.watch(self._pipe, self._on_readable)
            self._watched = True

    def drain_and_close(self) -> None:
        """Take what is in the pipe now, and close it: whoever still holds the other end is not waited for."""
        drained = 0
        while self.open and drained < _MOST_DRAINED:
            count = self._read()
            if count == 0:
                break
            drained += count
        self._close()

    def _on_readable(self) -> None:
        self._read()

    def _read(self) -> int:
        """Read once.  Returns the number of bytes; 0: nothing there now, or the end."""
        try:
            data = os.read(self._pipe, _READ)
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
        """Show ``data``, whole lines or a piece of one, and log it."""
        if self._log:
            self._log.write(self, data)
        lines = data.removesuffix(b"\n").split(b"\n")
        # What a progress bar overwrote by a carriage return is not shown; the log has it.
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
        self._sink.put(b"".join(self._prefix + line + b"\n" for line in shown))

    def _close(self) -> None:
        if self.open:
            self.pause()
            self.open = False
            if self._timer:
                self._timer.cancel()
            self._flush_partial()
            os.close(self._pipe)


class Console:
    """The launcher's own two streams, and all streams that are shown on them."""

    def __init__(self, loop: EventLoop, highest_id: int) -> None:
        self.loop = loop
        self._width = len(str(highest_id))
        self._streams: list[Stream] = []
        self._paused = False
        self._out = Sink(loop, sys.stdout.fileno(), self._check_pressure)
        self._err = Sink(loop, sys.stderr.fileno(), self._check_pressure)

    @property
    def flushed(self) -> bool:
        """Whether everything shown has reached the launcher's streams."""
        return self._out.empty and self._err.empty

    def say(self, text: str) -> None:
        """A line of the launcher itself, on stderr."""
        self._err.put(f"recover-run: {text}\n".encode(errors="backslashreplace"))

    def attach(self, label: str, colour: int, log: LogFile | None) -> tuple[list[Stream], int, int]:
        """Make the two pipes of a process.  Returns its streams, and the ends for its stdout and its stderr.

        The caller closes these two ends once the process has them, and calls ``read`` when its output may be shown.
        """
        streams, ends = [], []
        for sink in (self._out, self._err):
            read, write = os.pipe()
            streams.append(Stream(self, read, sink, self._prefix(label, colour, sink.colour), log))
            ends.append(write)
        self._streams = [stream for stream in self._streams if stream.open] + streams
        return streams, ends[0], ends[1]

    def read(self, streams: Sequence[Stream]) -> None:
        """Begin to read and show ``streams``."""
        for stream in streams:
            stream.wanted = True
            if not self._paused:
                stream.resume()

    def _check_pressure(self) -> None:
        """Stop reading the workers while the launcher's own reader is too slow; go on when it has caught up."""
        full = any(
            sink.size > (_MOST_PENDING // 2 if self._paused else _MOST_PENDING) for sink in (self._out, self._err)
        )
        if full == self._paused:
            return
        self._paused = full
        for stream in self._streams:
            if full:
                stream.pause()
            else:
                stream.resume()

    def _prefix(self, label: str, colour: int, coloured: bool) -> bytes:
        text = f"[{label}]"
        padding = " " * max(1, self._width + 3 - len(text))
        if coloured:
            text = f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{text}\x1b[0m"
        return (text + padding).encode()
