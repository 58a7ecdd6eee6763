"""Headless Chromium, spoken to over a pipe in the DevTools protocol: no driver, no port, no network.

    with Browser(folder) as browser:
        browser.open(page, width=400, dark=True)
        assert browser.run("document.title") == "..."

Messages are JSON objects that end with a zero byte; the browser reads them from descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from recover_megatron.network.event_loop import is_ready
from tests.harness.patience import patient

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = patient(60)
"""After which an answer that has not come is an error: of a machine that is busy with much else."""


def executable() -> str | None:
    """Of the browser, where there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


_LEFT = ("context was destroyed", "navigated or closed", "Cannot find context", "Cannot find default execution context")


class _PageLeft(Exception):
    """The page was left for another one before it had answered."""


class Browser:
    """One tab; with a profile of its own in ``folder``, and ended with all of its processes."""

    def __init__(self, folder: Path) -> None:
        program = executable()
        assert program is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += [f"--user-data-dir={folder / 'profile'}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []  # which root may not have
        command = f"exec {shlex.join([program, *options])} about:blank 3<&{to_read} 4>&{to_write}"
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", command],
                pass_fds=(to_read, to_write),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._last = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """Of the open page: exceptions of scripts, what its console says, what the browser itself found wrong."""
        self._loaded: set[str] = set()
        self._attach()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, page: Path, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """Load ``page`` in a window of ``width`` pixels, for a reader who wants ``dark`` or light."""
        self._set_window(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.complaints.clear()
        answer = self.ask("Page.navigate", url=page.resolve().as_uri())
        assert "errorText" not in answer, answer
        end = time.monotonic() + SECONDS
        while answer["loaderId"] not in self._loaded:
            self._hear(end)

    @property
    def loads(self) -> int:
        """How often a page was loaded."""
        return len(self._loaded)

    def wait_for_load(self, loads: int) -> None:
        """Until there were more than ``loads``."""
        end = time.monotonic() + SECONDS
        while self.loads <= loads:
            self._hear(end)

    def run(self, script: str) -> Any:
        """What ``script``, one expression, gives in the page; in the next one where the page is left meanwhile."""
        while True:
            try:
                answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
                break
            except _PageLeft:
                continue
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """The whole page, also what lies below the window, as PNG."""
        answer = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def print(self, path: Path) -> Path:
        """The page as it is printed, as PDF."""
        path.write_bytes(base64.b64decode(self.ask("Page.printToPDF")["data"]))
        return path

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command of the protocol, and wait for its answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        end = time.monotonic() + SECONDS
        while True:
            answer = self._hear(end)
            if answer.get("id") == self._last:
                if "error" in answer and any(text in answer["error"]["message"] for text in _LEFT):
                    raise _PageLeft(answer["error"]["message"])
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _attach(self) -> None:
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next((target["targetId"] for target in targets if target["type"] == "page"), None)
        if page is None:
            page = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    def _set_window(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)

    def _hear(self, end: float) -> dict[str, Any]:
        """The next message, which is an answer or tells of something."""
        while b"\0" not in self._rest:
            ready = is_ready(self._from, max(0.0, end - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, f"the browser {'has ended' if ready else 'does not answer'}"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        told = message.get("params", {})
        match message.get("method"):
            case "Page.lifecycleEvent" if told["name"] == "load":
                self._loaded.add(told["loaderId"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(told["entry"]["text"])
        return message
