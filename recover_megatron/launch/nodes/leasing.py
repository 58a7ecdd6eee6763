"""Lease and witness of a launch on several nodes: find out at the start whether the candidates can use them.

The lease (membership/io/lease.py) is tested: node 0 creates PATH.try with a random word in it, by the operation that
takes a lease.  Every other node with a candidate tries to create the same file: the storage must refuse that, and the
node must read the word and report it to node 0 when it joins.  This proves that all nodes see one folder, in which two
hosts cannot create the same file.  If the storage does not answer in time, there is no lease.

The witness (membership/witness.py) is SLURM or Kubernetes.  Each node reports to node 0 which of the two systems runs
it, and the node's name in that system.  A node with a candidate first queries the system about itself.  All nodes must
report the same system.  Node 0 sends all names to the candidates.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.membership.io.lease import publish
from recover_megatron.membership.io.testimony import ACCOUNT, KUBERNETES, SLURM, SOURCES, NoAnswer, Scope

AUTO, OFF = "auto", "off"
TRY_SECONDS = 5.0


def lease_path(spec: LaunchSpec, run_id: str) -> Path | None:
    """Return the common prefix of the paths of the lease's files on this node; None if the launch has no lease."""
    if spec.lease == OFF or (spec.lease == AUTO and spec.log_dir is None):
        return None
    place = spec.log_dir / "lease" if spec.lease == AUTO and spec.log_dir else Path(spec.lease)
    return place.with_name(f"{place.name}-{run_id}")


def slack_of(spec: LaunchSpec) -> int:
    """Return the largest difference between the numbers of workers of two live nodes (``leadership.permission``)."""
    return spec.nproc_per_node - 1 + spec.spares


def try_lease(spec: LaunchSpec, run_id: str) -> dict[str, str]:
    """Test the lease on a node other than 0; return its report to node 0: {"word": ...} or {"reason": ...}."""
    path = lease_path(spec, run_id)
    if path is None:
        return {"reason": why_no_lease(spec)}
    trial = _trial(path)

    def attempt() -> dict[str, str]:
        if publish(trial, "another folder"):
            trial.unlink()
            return {"reason": f"{trial.parent} is not the same folder as on node 0"}
        return {"word": trial.read_text()}

    return _within(attempt)


def why_no_lease(spec: LaunchSpec) -> str:
    return "--lease off" if spec.lease == OFF else "no --log-dir"


class LeaseTrial:
    """Test of the lease on node 0; other nodes call ``try_lease``."""

    def __init__(self, spec: LaunchSpec) -> None:
        """Write a random word to the storage, waiting at most ``TRY_SECONDS`` seconds."""
        self._spec = spec
        self._path = lease_path(spec, spec.run_id)
        self._word = secrets.token_hex(16)
        if self._path is None:
            self._own = {"reason": why_no_lease(spec)}
            return
        trial, word = _trial(self._path), self._word
        self._own = _within(lambda: {"word": word} if publish(trial, word) else {"reason": f"{trial} exists already"})

    def end(self, reports: Mapping[int, Any]) -> str:
        """End the test; return why there is no lease, or an empty text if all nodes in ``reports`` have read the word.

        ``reports``: reports of the other nodes with candidates, by rank.
        """
        answers = {0: self._own, **reports}
        if self._path is not None:
            _within(partial(_trial(self._path).unlink, missing_ok=True))
        for rank, answer in sorted(answers.items()):
            if not isinstance(answer, dict) or answer.get("word") != self._word:
                where = f"its folder for the lease is not the folder {self._path and self._path.parent} of node 0"
                return f"node {rank}: {str((isinstance(answer, dict) and answer.get('reason')) or where)[:300]}"
        if self._path is not None:  # nodes that join later check that they see this file
            _within(partial(self._path.touch, mode=0o600))
        return ""

    def in_words(self, why_not: str) -> str:
        if not why_not:
            return f"the run can survive the loss of either half of the workers: the lease is at {self._path}"
        return (
            f"no lease ({why_not}): the loss of half of the workers at once ends the run if the leading coordinator is "
            "lost with them"
        )


def lease_is_here(path: Path) -> str:
    """Return why a node that joins the run cannot use the lease; empty if it sees node 0's file at ``path``."""
    answer = _within(lambda: {} if path.exists() else {"reason": f"{path} does not exist"})
    return answer.get("reason", "")


def _trial(path: Path | None) -> Path:
    assert path is not None
    return path.with_name(f"{path.name}.try")


def _within(attempt: Callable[[], dict[str, str] | None]) -> dict[str, str]:
    """Call ``attempt`` in a thread; return its result, or a reason if it fails or takes longer than TRY_SECONDS."""
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
    """Return the name of this node in the system ``kind``; empty if the environment does not contain the name."""
    if kind == SLURM:
        return environ.get("SLURMD_NODENAME", "") if "SLURM_JOB_ID" in environ else ""
    name, uid, namespace = environ.get("POD_NAME"), environ.get("POD_UID"), environ.get("POD_NAMESPACE")
    if "KUBERNETES_SERVICE_HOST" not in environ or not name or not uid:
        return ""
    try:
        return f"{namespace or (account / 'namespace').read_text().strip()}/{name}/{uid}"
    except OSError:
        return ""


def look_for_witness(spec: LaunchSpec) -> dict[str, str]:
    """Return this node's report to node 0: the witness's kind and this node's name, or why there is no witness.

    Takes a few seconds at most.
    """
    own = {"node": spec.node_name}
    if spec.witness == OFF:
        return own
    kinds = [SLURM, KUBERNETES] if spec.witness == AUTO else [spec.witness]
    kind, place = next(((kind, place) for kind in kinds if (place := place_of(kind, spec.environ))), ("", ""))
    if not kind:
        return own if spec.witness == AUTO else {**own, "reason": f"no variable gives its name in {CALLED[kinds[0]]}"}
    if spec.node_rank in spec.candidate_nodes:
        try:
            known = SOURCES[kind]().look([place])
        except NoAnswer as error:
            return {**own, "reason": f"{CALLED[kind]}: {error}"}
        if known.get(place) is not False:
            return {**own, "reason": f"{CALLED[kind]} does not report that {place} is running"}
    return {**own, "kind": kind, "place": place}


def agree_on_witness(spec: LaunchSpec, reports: Mapping[int, Any], lease: bool) -> tuple[Scope | None, str]:
    """Return, from all nodes' reports, the scope of the witness for the candidates, and a log line (may be empty).

    The scope is None if there is no witness; the line then gives the reason, if one is known.  If the user has
    requested a witness (not AUTO), the caller must then refuse the launch.
    """
    by_rank = {rank: answer if isinstance(answer, dict) else {} for rank, answer in sorted(reports.items())}
    kinds = {str(answer.get("kind", "")) for answer in by_rank.values()}
    for rank, answer in by_rank.items():
        if answer.get("reason"):
            return None, f"no witness (node {rank}: {str(answer['reason'])[:300]})"
    if kinds == {""}:
        return None, ""
    if len(kinds) > 1:
        return None, "no witness (the nodes are not all in the same system, SLURM or Kubernetes)"
    if not lease:
        return None, "no witness (it needs a lease, and there is no lease)"
    scope = Scope(kinds.pop(), {str(answer["node"]): str(answer["place"]) for answer in by_rank.values()})
    if scope.kind not in CALLED or len(scope.places) != len(by_rank):
        return None, "no witness (the nodes do not report different names)"
    return scope, (
        f"the run can survive the loss of more than half of the workers, if {CALLED[scope.kind]} confirms that the "
        "lost nodes are off"
    )
