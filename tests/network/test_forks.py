"""A forked process closes what its parent holds open, whatever state that is in; so does one that it forks."""

from __future__ import annotations

import subprocess
import sys

from tests.harness.waiting import DEADLINE

PROGRAM = """
import os, socket, sys
from recover_megatron.network import system

class Held:
    def __init__(self, fails):
        self.sock, self.fails = socket.socket(), fails
        system.close_in_children(self)

    def close_in_child(self):
        if self.fails:
            os.close(-1)  # as where it was closed already
        self.sock.close()

def forked(check):
    pid = os.fork()
    if pid == 0:
        os._exit(check())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def watches():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        system.watch(sock)
        return system._watch._thread.is_alive()

held = [Held(True), Held(False), Held(True), Held(False)]
own = Held(False)
assert watches()

def child():
    if any(one.sock.fileno() >= 0 for one in held if not one.fails):
        return 1
    if not watches():
        return 2
    mine = Held(False)
    return forked(lambda: 0 if mine.sock.fileno() < 0 and watches() else 3)

print(forked(child), all(one.sock.fileno() >= 0 for one in held))
"""


def test_children_and_their_children_close_what_is_not_theirs_and_watch_connections_of_their_own() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.returncode) == ("0 True\n", 0), done.stderr
