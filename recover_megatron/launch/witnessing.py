"""Whether a launch over several nodes has a witness (membership/witness.py), and which, found out at the start.

Each node tells node 0 what SLURM or Kubernetes calls it, and which of the two; nodes with a candidate coordinator have
asked it about themselves before. All must tell the same kind. Node 0 gives the candidates all names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recover_megatron.launch.candidates import hosting
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.membership.testimony import ACCOUNT, KUBERNETES, SLURM, SOURCES, NoAnswer, Scope

AUTO, OFF = "auto", "off"
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


def look(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
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


def agree(plan: LaunchPlan, told: Mapping[int, Any], lease: bool) -> tuple[Scope | None, str]:
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
