"""What a launch over several nodes finds out at its start: whether its candidates share a lease, and have a witness.

The lease (membership/io/lease.py) is tried out. Node 0 writes a random word to PATH.try, by the call that takes a
lease. A node with a candidate tries to write that file, too: it must be refused, read the word, and tell it to node
0 with what it says when it joins. So all of them see one folder, and of two hosts that want the same name there one
gets it. Storage that hangs is no storage.

The witness (membership/witness.py) is SLURM or Kubernetes. Each node tells node 0 which of the two runs it, and what
that calls it; nodes with a candidate have asked it about themselves before. All must tell the same kind. Node 0 gives
the candidates all names.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from recover_megatron.launch.command_line.plan import LaunchPlan, hosting
from recover_megatron.membership.io.lease import publish
from recover_megatron.membership.io.testimony import ACCOUNT, KUBERNETES, SLURM, SOURCES, NoAnswer, Scope

AUTO, OFF = "auto", "off"
TRY_SECONDS = 5.0


def lease_path(plan: LaunchPlan, run_id: str) -> Path | None:
    """The lease's files on this node are this path and a number; None: it has none, see ``why_no_lease``."""
    if plan.lease == OFF or (plan.lease == AUTO and plan.log_dir is None):
        return None
    place = plan.log_dir / "lease" if plan.lease == AUTO and plan.log_dir else Path(plan.lease)
    return place.with_name(f"{place.name}-{run_id}")


def slack_of(plan: LaunchPlan) -> int:
    """By so many workers two nodes may differ, each of which has one left (``leadership.standing``)."""
    return plan.nproc_per_node - 1 + plan.spares


def try_lease(plan: LaunchPlan, run_id: str) -> dict[str, str]:
    """Another node's part of the trial, for node 0: the word, or why there is none."""
    path = lease_path(plan, run_id)
    if path is None:
        return {"reason": why_no_lease(plan)}
    trial = _trial(path)

    def attempt() -> dict[str, str]:
        if publish(trial, "another folder"):
            trial.unlink()
            return {"reason": f"{trial.parent} is not the folder of node 0"}
        return {"word": trial.read_text()}

    return _within(attempt)


def why_no_lease(plan: LaunchPlan) -> str:
    return "--lease off" if plan.lease == OFF else "no --log-dir"


class LeaseTrial:
    """Node 0's part of the trial of the lease."""

    def __init__(self, plan: LaunchPlan) -> None:
        """Write the word; waits ``TRY_SECONDS`` for the storage."""
        self._plan = plan
        self._path = lease_path(plan, plan.run_id)
        self._word = secrets.token_hex(16)
        if self._path is None:
            self._own = {"reason": why_no_lease(plan)}
            return
        trial, word = _trial(self._path), self._word
        self._own = _within(lambda: {"word": word} if publish(trial, word) else {"reason": f"{trial} is there already"})

    def end(self, told: Mapping[int, Any]) -> str:
        """Why there is no lease, by what the other nodes with candidates have told; empty: there is one."""
        answers = {0: self._own, **told}
        if self._path is not None:
            _within(partial(_trial(self._path).unlink, missing_ok=True))
        for rank, answer in sorted(answers.items()):
            if not isinstance(answer, dict) or answer.get("word") != self._word:
                reason = answer.get("reason") if isinstance(answer, dict) else None
                return f"node {rank}: {str(reason or 'it does not see the folder of node 0')[:300]}"
        if self._path is not None:  # a node that joins later knows by this file that it sees the same folder
            _within(partial(self._path.touch, mode=0o600))
        return ""

    def in_words(self, why_not: str) -> str:
        if not why_not:
            return f"either half of the workers may be lost: the lease is at {self._path}"
        return (
            f"no lease ({why_not}): the loss of half of the workers at once ends the run if the leading coordinator is "
            "among them"
        )


def lease_is_here(path: Path) -> str:
    """Why a node that joins the run later cannot use the lease at ``path``; empty: it sees what node 0 has left."""
    answer = _within(lambda: {} if path.exists() else {"reason": f"{path} is not there"})
    return answer.get("reason", "")


def _trial(path: Path | None) -> Path:
    assert path is not None
    return path.with_name(f"{path.name}.try")


def _within(attempt: Callable[[], dict[str, str] | None]) -> dict[str, str]:
    """What ``attempt`` returns, if anything, or the reason if it fails or takes too long."""
    answer: dict[str, str] = {"reason": f"the storage has not answered for {TRY_SECONDS:g} s"}

    def run() -> None:
        nonlocal answer
        try:
            answer = attempt() or {}
        except OSError as error:
            answer = {"reason": f"{error.filename or 'the storage'}: {error.strerror}"}

    thread = threading.Thread(target=run, daemon=True, name="recover-launch-lease")
    thread.start()
    thread.join(TRY_SECONDS)
    return answer


CALLED = {SLURM: "SLURM's controller", KUBERNETES: "Kubernetes' API server"}


def place_of(kind: str, environ: Mapping[str, str], account: Path = ACCOUNT) -> str:
    """What a witness of this kind calls this node; empty: it is none of its nodes, for all that is known here."""
    if kind == SLURM:
        return environ.get("SLURMD_NODENAME", "") if "SLURM_JOB_ID" in environ else ""
    name, uid, namespace = environ.get("POD_NAME"), environ.get("POD_UID"), environ.get("POD_NAMESPACE")
    if "KUBERNETES_SERVICE_HOST" not in environ or not name or not uid:
        return ""
    try:
        return f"{namespace or (account / 'namespace').read_text().strip()}/{name}/{uid}"
    except OSError:
        return ""


def look_for_witness(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What this node tells node 0: its kind and place, or why it has none. Takes a few seconds at most."""
    told = {"node": plan.node_name}
    if plan.witness == OFF:
        return told
    kinds = [SLURM, KUBERNETES] if plan.witness == AUTO else [plan.witness]
    kind, place = next(((kind, place) for kind in kinds if (place := place_of(kind, environ))), ("", ""))
    if not kind:
        return told if plan.witness == AUTO else {**told, "reason": f"this is no node of {CALLED[kinds[0]]}"}
    if plan.node_rank in hosting(plan):
        try:
            known = SOURCES[kind]().look([place])
        except NoAnswer as error:
            return {**told, "reason": f"{CALLED[kind]}: {error}"}
        if known.get(place) is not False:
            return {**told, "reason": f"{CALLED[kind]} does not know that {place} runs"}
    return {**told, "kind": kind, "place": place}


def agree_on_witness(plan: LaunchPlan, told: Mapping[int, Any], lease: bool) -> tuple[Scope | None, str]:
    """What the candidates are to know, and what to tell people (empty: nothing); ``told``: by all nodes.

    None with AUTO: there is none, and the line says why, if there is anything to say. Else a reason against the launch.
    """
    words = {rank: answer if isinstance(answer, dict) else {} for rank, answer in sorted(told.items())}
    kinds = {str(answer.get("kind", "")) for answer in words.values()}
    for rank, answer in words.items():
        if answer.get("reason"):
            return None, f"no witness (node {rank}: {str(answer['reason'])[:300]})"
    if kinds == {""}:
        return None, ""
    if len(kinds) > 1:
        return None, "no witness (not all nodes are SLURM's, or Kubernetes')"
    if not lease:
        return None, "no witness (it needs a lease, and there is none)"
    scope = Scope(kinds.pop(), {str(answer["node"]): str(answer["place"]) for answer in words.values()})
    if scope.kind not in CALLED or len(scope.places) != len(words):
        return None, "no witness (the nodes tell no names of their own)"
    return scope, (
        f"fewer than half of the workers may be left: {CALLED[scope.kind]} is asked then whether the others' nodes are "
        "off for certain"
    )
