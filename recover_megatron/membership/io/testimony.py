"""Thread that asks SLURM's controller or Kubernetes' API server which nodes are off.

A *place* is the witness's name of a node or pod. A node or pod counts as off only if its end is irreversible and
verified:

* SLURM: the node is POWERED_DOWN, so the site's program has cut its power, and has had the time to do so. A node
  that is DOWN, FAIL or not responding (``DOWN*``) is not off: its processes continue until they are killed.
* Kubernetes: the pod (of the same UID) is Failed or Succeeded, and the kubelet has seen each of its containers end. A
  pod is not off if it is missing or being deleted, or if its node does not answer: it may be running. The phase alone
  is not enough, because a kubelet that evicts a pod reports Failed before it kills the containers.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recover_megatron.membership.events import Statement
from recover_megatron.network.event_loop import is_ready
from recover_megatron.variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE

SLURM, KUBERNETES = "slurm", "kubernetes"
ASK_SECONDS = 5.0
"""Seconds within which the witness must answer."""
MOST_BYTES = 8 << 20
"""Maximum bytes of the witness's answer."""
_AT_ONCE = 500  # maximum nodes in one call of scontrol, to keep the command line below 128 KiB
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_POD = re.compile(r"([a-z0-9][a-z0-9-]{0,62})/([a-z0-9][a-z0-9.-]{0,252})/([A-Za-z0-9-]{1,64})")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoAnswer(Exception):
    """The witness cannot be asked, or has not answered; the message has the reason, without any secret."""


class Source(Protocol):
    """Interface to a witness, which knows whether nodes are off."""

    name: str
    """Name of the witness, for messages."""

    def look(self, places: Iterable[str]) -> dict[str, bool]:
        """Return place -> whether it is off, for the places that the witness knows. Raises NoAnswer."""


@dataclass(frozen=True)
class Scope:
    """Data that the candidates of a run need to ask its witness."""

    kind: str
    """Kind of witness: ``SLURM`` or ``KUBERNETES``."""
    places: Mapping[str, str]
    """Name of a node's launcher -> the witness's name of the node."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "places": dict(self.places)}

    @staticmethod
    def from_json(value: Any) -> Scope:
        """Return the scope. Raises ValueError for anything that ``to_json`` does not produce."""
        match value:
            case {"kind": str(kind), "places": dict(places)} if kind in SOURCES:
                if all(type(name) is str and type(place) is str for name, place in places.items()):
                    return Scope(kind, places)
        raise ValueError("not a witness scope")


# -- SLURM ------------------------------------------------------------------------------------------------------------


def slurm_states(output: str) -> dict[str, frozenset[str]]:
    """Return node -> its states, from the output of ``scontrol --oneliner show node``.

    ``DOWN*+POWERED_DOWN`` gives the states DOWN and POWERED_DOWN. A line is left out if it does not have exactly one
    name and one list of states.
    """
    found = {}
    for line in output.splitlines():
        facts = line.partition(" Reason=")[0]
        name, states = re.findall(r"^NodeName=(\S+)", facts), re.findall(r"\sState=(\S+)", facts)
        if len(name) == len(states) == 1:
            found[name[0]] = frozenset(re.sub(r"[^A-Z_]+$", "", state) for state in states[0].split("+"))
    return found


def is_powered_off(states: frozenset[str]) -> bool:
    """Return whether certainly no process runs on a node with these states."""
    return "POWERED_DOWN" in states and states.isdisjoint({"POWERING_DOWN", "POWERING_UP", "POWER_UP"})


class Slurm:
    """Queries SLURM's controller with ``scontrol``; a place is the name of a node."""

    name = "SLURM"

    def look(self, places: Iterable[str]) -> dict[str, bool]:
        program = shutil.which("scontrol")
        if program is None:
            raise NoAnswer("scontrol was not found")
        names = sorted(set(places))
        if not all(map(_NODE.fullmatch, names)):
            raise NoAnswer("a node's name is not a valid SLURM node name")
        until = time.monotonic() + ASK_SECONDS
        found: dict[str, bool] = {}
        for first in range(0, len(names), _AT_ONCE):
            asked = names[first : first + _AT_ONCE]
            states = slurm_states(_output([program, "--oneliner", "show", "node", ",".join(asked)], until))
            found.update({name: is_powered_off(states[name]) for name in asked if name in states})
        return found


def _output(command: list[str], until: float) -> str:
    """Run a command and return its output about nodes. It is killed if it runs beyond ``until`` (monotonic seconds).

    Raises NoAnswer if the command cannot run, is too slow, or prints no nodes. The exit code is ignored, because a
    launcher waits for all of its children and may have reaped the command.
    """
    hidden = (SECRET_VARIABLE, SECRET_FILE_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise NoAnswer(f"{command[0]} cannot be started: {error.strerror}") from error
    assert process.stdout is not None
    with process.stdout as pipe:
        try:
            output = _read(pipe.fileno(), until, os.path.basename(command[0]))
            process.wait(max(0.0, until - time.monotonic()) + 0.1)
        except (NoAnswer, subprocess.TimeoutExpired) as error:
            with suppress(ChildProcessError):  # reaped elsewhere, so its pid may belong to another process
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.killpg(process.pid, signal.SIGKILL)
            threading.Thread(target=process.wait, daemon=True, name="recover-witness-reap").start()
            raise NoAnswer(str(error)) from error
    if "NodeName=" not in output:
        last = next(iter(reversed(output.split("\n")[:-1])), "nothing")
        raise NoAnswer(f"{os.path.basename(command[0])} printed: {last[:200]}")
    return output


def _read(descriptor: int, until: float, what: str) -> str:
    """Return all output up to the end of file. Raises NoAnswer after ``until``, or if it exceeds ``MOST_BYTES``."""
    output = bytearray()
    while (left := until - time.monotonic()) > 0:
        if not is_ready(descriptor, left):
            break
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return output.decode(errors="replace")
        output += piece
        if len(output) > MOST_BYTES:
            raise NoAnswer(f"{what} printed more than {MOST_BYTES >> 20} MiB")
    raise NoAnswer(f"{what} has not answered within {ASK_SECONDS:g} s")


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def pod_has_ended(pod: Any, uid: str) -> bool | None:
    """Return whether the kubelet has seen all containers of the pod end; None: another UID, or a malformed object."""
    try:
        if pod["metadata"]["uid"] != uid:
            return None
        status = pod["status"]
        if status.get("phase") not in ("Failed", "Succeeded"):
            return False
        containers, seen = pod["spec"]["containers"], status.get("containerStatuses", [])
        ends = [container["state"].get("terminated") for container in seen]
    except (KeyError, TypeError, AttributeError):
        return None
    unknown = "ContainerStatusUnknown"  # no kubelet has seen the container end
    return len(ends) == len(containers) > 0 and all(end and end.get("reason") != unknown for end in ends)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because only the API server may receive the token."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Pods:
    """Queries Kubernetes' API server with a pod's service account; a place is NAMESPACE/POD/UID."""

    name = "Kubernetes"

    def __init__(self, server: str = "", account: Path = ACCOUNT) -> None:
        """Use ``server`` (https://HOST:PORT; default: environment) with token and ca.crt in folder ``account``."""
        self._server = server
        self._account = account

    def look(self, places: Iterable[str]) -> dict[str, bool]:
        """Return place -> whether the pod has ended, like ``Source.look``. Raises NoAnswer.

        If time runs out, some places (random ones) are missing.
        """
        until = time.monotonic() + ASK_SECONDS
        found: dict[str, bool] = {}
        ask = self._opener()
        for place in set(places):
            if time.monotonic() > until and found:
                break
            match = _POD.fullmatch(place)
            if match is None:
                raise NoAnswer("a pod's name is not NAMESPACE/POD/UID")
            namespace, name, uid = match.groups()
            pod = ask(f"/api/v1/namespaces/{namespace}/pods/{name}", until)
            ended = pod_has_ended(pod, uid) if pod is not None else None
            if ended is not None:
                found[place] = ended
        return found

    def _opener(self) -> Callable[[str, float], Any]:
        """Return a function that requests a path from the API server and returns the object, or None if none exists.

        Each call of this method reads the token again, because it may change.
        """
        server = self._server or _server_of(os.environ)
        try:
            token = (self._account / "token").read_text().strip()
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        except OSError as error:
            raise NoAnswer(f"the pod has no service account: {error.strerror}") from error
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect
        )

        def ask(path: str, until: float) -> Any:
            request = urllib.request.Request(server + path, headers={"Accept": "application/json"})
            request.add_unredirected_header("Authorization", f"Bearer {token}")
            try:
                with opener.open(request, timeout=max(0.1, until - time.monotonic())) as answer:
                    return json.loads(_body(answer, until))
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                hint = ": allow get on pods (docs/kubernetes.md)" if error.code in (401, 403) else ""
                raise NoAnswer(f"the API server answered {error.code} {error.reason}{hint}") from None
            except (OSError, ValueError) as error:
                raise NoAnswer(f"the API server failed: {getattr(error, 'reason', None) or error}") from None

        return ask


def _body(answer: Any, until: float) -> bytes:
    content = bytearray()
    while piece := answer.read1(1 << 16):
        content += piece
        if len(content) > MOST_BYTES or time.monotonic() > until:
            raise ValueError("the answer takes too long, or is too large")
    return bytes(content)


def _server_of(environ: Mapping[str, str]) -> str:
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise NoAnswer("KUBERNETES_SERVICE_HOST is not set")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


# -- thread -----------------------------------------------------------------------------------------------------------

SOURCES: Mapping[str, Callable[[], Source]] = {SLURM: Slurm, KUBERNETES: Pods}


class WitnessThread:
    """Asks the witness in a separate thread, which calls ``report`` if nodes are off, and once when answers stop."""

    def __init__(self, scope: Scope, report: Callable[[Statement], None], source: Source | None = None) -> None:
        """Start the thread. ``source``: interface to the witness; None: chosen by the scope's kind."""
        self._scope = scope
        self._source = SOURCES[scope.kind]() if source is None else source
        self._report = report
        self._asked: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
        self._failing = False  # True if the last attempt failed; only the first failure is reported
        threading.Thread(target=self._run, daemon=True, name="recover-witness").start()

    def ask(self, nodes: frozenset[str]) -> None:
        """Ask about these nodes, without waiting. If several requests are pending, only the last one is sent."""
        self._asked.put(nodes)

    def _run(self) -> None:
        while True:
            nodes = self._asked.get()
            while not self._asked.empty():
                nodes = self._asked.get()
            if (testimony := self._testimony(nodes)) is not None:
                self._report(testimony)

    def _testimony(self, nodes: frozenset[str]) -> Statement | None:
        places = {node: place for node, place in self._scope.places.items() if node in nodes}
        try:
            found = self._source.look(places.values())
        except NoAnswer as error:
            reported, self._failing = self._failing, True
            return None if reported else Statement(frozenset(), f"{self._source.name} does not answer: {error}")
        self._failing = False
        off = {node: place for node, place in places.items() if found.get(place)}
        if not off:
            return None
        named = ", ".join(sorted(off.values())[:4]) + (f" and {len(off) - 4} more" if len(off) > 4 else "")
        how = "powered off" if self._scope.kind == SLURM else "ended"
        return Statement(frozenset(off), f"{self._source.name} reports {named} as {how}")
