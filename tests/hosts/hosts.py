"""Hosts made of namespaces, on one switch: each with its own network, host name, shared memory, mounts and processes.

    with Hosts(3) as hosts:                      1: 10.83.0.1, 2: 10.83.0.2, ...; the switch itself is 10.83.0.254
        process = hosts.start(2, ["recover-run", ...], out=folder / "host2.out")
        hosts.cable(2, up=False)                 nobody hears host 2 any more, and it hears nobody: the carrier is gone
        hosts.part(2, 3)                         these do not hear each other, all others hear both: packets vanish
        hosts.refuse(2, 3)                       as ``part``, but whoever tries is told at once
        hosts.mend()                             all as at the start
        hosts.power_off(2)                       its cable, then all its processes: nobody is told anything

``part`` is done by the switch (isolated ports): who tries to connect for the first time learns after some seconds that
nobody has the address, connections that are there only fall silent.

Needs root, ``ip`` and ``unshare``; `unavailable` says why it does not work here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.harness import REPOSITORY
from tests.harness.patience import patient

SWITCH = 254
"""The switch's own address ends so: every host hears it, parted or not."""
_SECONDS = patient(60)


def unavailable() -> str:
    """Why there can be no hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        return f"hosts of their own need {' and '.join(missing)} (Debian: iproute2, util-linux)"
    name = f"try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=_SECONDS, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.decode(errors='replace').strip()}"
    bridge = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
    made = subprocess.run(bridge, capture_output=True, timeout=_SECONDS, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_SECONDS, check=False)
    return f"no bridges here: {made.stderr.decode(errors='replace').strip()}" if made.returncode else ""


class Hosts:
    """``count`` of them, numbered from 1; several sets may be there at a time."""

    def __init__(self, count: int, *, resolve: bool = True, private_tmp: Sequence[Path] | None = None) -> None:
        """``resolve``: whether their names resolve.  ``private_tmp``: they have /tmp for themselves, but these folders
        below it are the machine's."""
        self.count = count
        self._tag = f"rm{os.getpid()}-{id(self) & 0xFFFF:x}"
        self._keep = private_tmp
        self._resolve = resolve
        self._folder = Path()
        self._started: dict[int, list[subprocess.Popen[bytes]]] = {host: [] for host in self}

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self.count + 1))

    def address(self, host: int) -> str:
        """Of a host, or of the switch (``SWITCH``)."""
        return f"10.83.0.{host}"

    def network(self, host: int) -> str:
        """The file of a host's network namespace, for ``os.setns``; that of the switch for ``SWITCH``."""
        return f"/run/netns/{self.space(host)}"

    def space(self, host: int) -> str:
        """The name of a host's network namespace, for ``ip``."""
        return f"{self._tag}-sw" if host == SWITCH else f"{self._tag}-{host}"

    # ---- making them

    def __enter__(self) -> Hosts:
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/var/tmp"))
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        switch = self.space(SWITCH)
        _ip("netns", "add", switch)
        for words in ("link set lo up", "link add br0 type bridge", f"addr add {self.address(SWITCH)}/24 dev br0"):
            _ip("-n", switch, *words.split())
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in self:
            space = self.space(host)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "e0", "netns", space)
            _ip("-n", switch, "link", "set", f"port{host}", "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "e0")
            _ip("-n", space, "link", "set", "e0", "up")
        names = [f"{self.address(host)} {self.name(host)}" for host in self] if self._resolve else []
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def name(self, host: int) -> str:
        """A host's name."""
        return f"host{host}"

    def __exit__(self, *_: object) -> None:
        for host in self:
            self.kill(host)
        for host in (*self, SWITCH):
            _ip("netns", "del", self.space(host), check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- what runs on them

    def start(
        self,
        host: int,
        command: Sequence[object],
        out: Path,
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command on a host, its output into ``out``.  What ``poll`` and ``wait`` tell is the command's."""
        steps = [
            f"hostname {self.name(host)}",
            "mount --make-rprivate /",
            f"mount --bind {self._folder / 'hosts'} /etc/hosts",
            "mount -t tmpfs tmpfs /dev/shm",
        ]
        if self._keep is not None:
            kept = [(self._folder / f"kept{number}", folder) for number, folder in enumerate(self._keep)]
            steps += [f"mkdir -p {at} && mount --bind {shlex.quote(str(folder))} {at}" for at, folder in kept]
            steps.append("mount -t tmpfs tmpfs /tmp")
            for at, folder in kept:
                name = shlex.quote(str(folder))
                steps.append(f"mkdir -p {name} && mount --bind {at} {name}")
        if cwd is not None:
            steps.append(f"cd {shlex.quote(str(cwd))}")
        steps.append("exec " + shlex.join(map(str, command)))
        own = "unshare --uts --ipc --mount --pid --fork --kill-child --mount-proc bash -c".split()
        with out.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space(host), *own, " && ".join(steps)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self._started[host].append(process)
        return process

    def recover_run(
        self, host: int, *argv: object, out: Path, environment: Mapping[str, str], cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the launcher of a host, of a launch over all of them whose store is on the first."""
        command = [sys.executable, "-m", "recover_megatron.launch", "--nnodes", self.count, "--node-rank", host - 1]
        command += ["--master-addr", self.address(1), "--master-port", 29400, *argv]
        return self.start(host, command, out, environment={"PYTHONPATH": str(REPOSITORY), **environment}, cwd=cwd)

    def kill(self, host: int) -> None:
        """SIGKILL to everything that runs there; its kernel tells the others."""
        for process in self._started[host]:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # the end of its process 1 ends all of the host's
            process.wait()
        self._started[host].clear()

    def power_off(self, host: int) -> None:
        """End everything there; nobody is told."""
        self.cable(host, up=False)
        self.kill(host)

    # ---- the roads

    def cable(self, host: int, *, up: bool) -> None:
        """Pull a host's cable, or put it back."""
        _ip("-n", self.space(SWITCH), "link", "set", f"port{host}", "up" if up else "down")

    def part(self, *hosts: int) -> None:
        """None of these hears another of them; what they send each other vanishes."""
        for host in hosts:
            self._isolate(host, "on")

    def refuse(self, one: int, other: int) -> None:
        """These two cannot send to each other, and know at once."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self.space(here), "route", "replace", "unreachable", f"{self.address(there)}/32")

    def mend(self) -> None:
        """All cables and roads are as at the start."""
        for host in self:  # first of all, so that an outage is as long as its test has it
            self.cable(host, up=True)
        for host in self:
            self._isolate(host, "off")
            for other in self:
                unreachable = ("route", "del", "unreachable", f"{self.address(other)}/32")
                _ip("-n", self.space(host), *unreachable, check=False)
            # Who asked for an address in vain is about to be told that there is none.
            _ip("-n", self.space(host), "neigh", "flush", "dev", "e0")

    def _isolate(self, host: int, how: str) -> None:
        _ip("-n", self.space(SWITCH), "link", "set", f"port{host}", "type", "bridge_slave", "isolated", how)


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, timeout=_SECONDS, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.decode(errors='replace').strip()}")
