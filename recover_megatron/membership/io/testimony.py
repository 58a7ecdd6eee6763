"""The word of SLURM's controller or Kubernetes' API server on which nodes are off; asked in a thread.

What is believed is an end that cannot be taken back, and that somebody has made sure of:

* SLURM: a node is POWERED_DOWN: the site's program has cut its power, and had the time to do it. Not DOWN, FAIL or
  not responding (``DOWN*``): its processes go on as long as nobody kills them there.
* Kubernetes: a pod (of the same UID) is Failed or Succeeded, and its kubelet has seen each of its containers end. Not a
  pod that is gone or being deleted, nor one whose node does not answer: they may be running. A kubelet that evicts says
  Failed before it kills, so the phase alone is not enough.
"""

from __future__ import annotations

import json
import os
import queue
import re
import select
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
from recover_megatron.variables import SECRET_FILE_VARIABLE, SECRET_VARIABLE

SLURM, KUBERNETES = "slurm", "kubernetes"
ASK_SECONDS = 5.0
"""Until an answer is none."""
MOST_BYTES = 8 << 20
"""Of an answer."""
_AT_ONCE = 500  # nodes that one scontrol is asked about: a command line must stay below 128 KiB
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_POD = re.compile(r"([a-z0-9][a-z0-9-]{0,62})/([a-z0-9][a-z0-9.-]{0,252})/([A-Za-z0-9-]{1,64})")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoAnswer(Exception):
    """The witness cannot be asked, or has not answered; the message says why, without any secret."""


class Source(Protocol):
    """Where testimonies come from."""

    name: str
    """For people."""

    def look(self, places: Iterable[str]) -> dict[str, bool]:
        """Of each place that is known there: whether it is off. Raises NoAnswer."""


@dataclass(frozen=True)
class Scope:
    """What the candidates of a run need to know of its witness."""

    kind: str
    """SLURM or KUBERNETES."""
    places: Mapping[str, str]
    """By the name of a node's launcher: what the witness calls it."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "places": dict(self.places)}

    @staticmethod
    def from_json(told: Any) -> Scope:
        """Raises ValueError for anything that ``to_json`` does not make."""
        match told:
            case {"kind": str(kind), "places": dict(places)} if kind in SOURCES:
                if all(type(name) is str and type(place) is str for name, place in places.items()):
                    return Scope(kind, places)
        raise ValueError("not the scope of a witness")


# -- SLURM ------------------------------------------------------------------------------------------------------------


def slurm_states(said: str) -> dict[str, frozenset[str]]:
    """The states of each node in what ``scontrol --oneliner show node`` prints: ``DOWN*+POWERED_DOWN`` is two.

    Without the signs behind the first one. A line that cannot be read in one way only is left out.
    """
    found = {}
    for line in said.splitlines():
        facts = line.partition(" Reason=")[0]
        name, states = re.findall(r"^NodeName=(\S+)", facts), re.findall(r"\sState=(\S+)", facts)
        if len(name) == len(states) == 1:
            found[name[0]] = frozenset(re.sub(r"[^A-Z_]+$", "", state) for state in states[0].split("+"))
    return found


def is_powered_off(states: frozenset[str]) -> bool:
    """Whether nothing runs on such a node."""
    return "POWERED_DOWN" in states and states.isdisjoint({"POWERING_DOWN", "POWERING_UP", "POWER_UP"})


class Slurm:
    """SLURM's controller, by ``scontrol``; a place is the name of a node."""

    name = "SLURM"

    def look(self, places: Iterable[str]) -> dict[str, bool]:
        program = shutil.which("scontrol")
        if program is None:
            raise NoAnswer("there is no scontrol")
        names = sorted(set(places))
        if not all(map(_NODE.fullmatch, names)):
            raise NoAnswer("the name of a node is none of SLURM's")
        until = time.monotonic() + ASK_SECONDS
        found: dict[str, bool] = {}
        for first in range(0, len(names), _AT_ONCE):
            asked = names[first : first + _AT_ONCE]
            states = slurm_states(_output([program, "--oneliner", "show", "node", ",".join(asked)], until))
            found.update({name: is_powered_off(states[name]) for name in asked if name in states})
        return found


def _output(command: list[str], until: float) -> str:
    """What a command prints of nodes. It ends by ``until``, or is killed. Raises NoAnswer where it tells of none.

    Its exit code says nothing: a launcher waits for all of its children, so it may have been taken by then.
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
            said = _read(pipe.fileno(), until, os.path.basename(command[0]))
            process.wait(max(0.0, until - time.monotonic()) + 0.1)
        except (NoAnswer, subprocess.TimeoutExpired) as error:
            with suppress(ChildProcessError):  # somebody else has waited for it: its number may be another's
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.killpg(process.pid, signal.SIGKILL)
            threading.Thread(target=process.wait, daemon=True, name="recover-witness-reap").start()
            raise NoAnswer(str(error)) from error
    if "NodeName=" not in said:
        last = next(iter(reversed(said.split("\n")[:-1])), "nothing")
        raise NoAnswer(f"{os.path.basename(command[0])} says: {last[:200]}")
    return said


def _read(descriptor: int, until: float, what: str) -> str:
    """All that comes to its end. Raises NoAnswer where that takes too long, or is too much."""
    said = bytearray()
    while (left := until - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            break
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return said.decode(errors="replace")
        said += piece
        if len(said) > MOST_BYTES:
            raise NoAnswer(f"{what} says more than {MOST_BYTES >> 20} MiB")
    raise NoAnswer(f"{what} has not answered within {ASK_SECONDS:g} s")


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def pod_has_ended(pod: Any, uid: str) -> bool | None:
    """Whether the kubelet of the pod's node has seen all of its containers end; None: this is not the pod."""
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
    unknown = "ContainerStatusUnknown"  # nobody has seen its end
    return len(ends) == len(containers) > 0 and all(end and end.get("reason") != unknown for end in ends)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token is for the API server alone."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Pods:
    """Kubernetes' API server, as a pod's service account reaches it; a place is NAMESPACE/POD/UID."""

    name = "Kubernetes"

    def __init__(self, server: str = "", account: Path = ACCOUNT) -> None:
        """``server``: https://HOST:PORT; empty: that of the environment. ``account``: folder of token and ca.crt."""
        self._server = server
        self._account = account

    def look(self, places: Iterable[str]) -> dict[str, bool]:
        """As ``Source.look``; within the time, so of many pods perhaps of some only, each time of others."""
        until = time.monotonic() + ASK_SECONDS
        found: dict[str, bool] = {}
        ask = self._opener()
        for place in set(places):
            if time.monotonic() > until and found:
                break
            match = _POD.fullmatch(place)
            if match is None:
                raise NoAnswer("the name of a pod is none of Kubernetes'")
            namespace, name, uid = match.groups()
            pod = ask(f"/api/v1/namespaces/{namespace}/pods/{name}", until)
            ended = pod_has_ended(pod, uid) if pod is not None else None
            if ended is not None:
                found[place] = ended
        return found

    def _opener(self) -> Callable[[str, float], Any]:
        """Asks for a path: the answer, None where there is nothing. The token may be another one each time."""
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
                hint = ": it needs get on pods (docs/kubernetes.md)" if error.code in (401, 403) else ""
                raise NoAnswer(f"the API server refuses, {error.code} {error.reason}{hint}") from None
            except (OSError, ValueError) as error:
                raise NoAnswer(f"the API server: {getattr(error, 'reason', None) or error}") from None

        return ask


def _body(answer: Any, until: float) -> bytes:
    said = bytearray()
    while piece := answer.read1(1 << 16):
        said += piece
        if len(said) > MOST_BYTES or time.monotonic() > until:
            raise ValueError("its answer takes too long, or is too long")
    return bytes(said)


def _server_of(environ: Mapping[str, str]) -> str:
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise NoAnswer("KUBERNETES_SERVICE_HOST is not set")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


# -- asking -----------------------------------------------------------------------------------------------------------

SOURCES: Mapping[str, Callable[[], Source]] = {SLURM: Slurm, KUBERNETES: Pods}


class WitnessThread:
    """Asks in a thread of its own; ``report`` is called there, when there is news, and when there is no answer."""

    def __init__(self, scope: Scope, report: Callable[[Statement], None], source: Source | None = None) -> None:
        """``source``: that of the scope's kind, unless given."""
        self._scope = scope
        self._source = SOURCES[scope.kind]() if source is None else source
        self._report = report
        self._asked: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
        self._failing = False  # and that was told
        threading.Thread(target=self._run, daemon=True, name="recover-witness").start()

    def ask(self, nodes: frozenset[str]) -> None:
        """Ask about these nodes; of what was asked meanwhile the last question alone is."""
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
            told, self._failing = self._failing, True
            return None if told else Statement(frozenset(), f"nothing is heard of {self._source.name}: {error}")
        self._failing = False
        off = {node: place for node, place in places.items() if found.get(place)}
        if not off:
            return None
        named = ", ".join(sorted(off.values())[:4]) + (f" and {len(off) - 4} more" if len(off) > 4 else "")
        how = "powered off" if self._scope.kind == SLURM else "ended"
        return Statement(frozenset(off), f"{self._source.name} says of {named}: {how}")
