"""Control plane: coordinator, sessions, epochs, revoke, agree. Standard library and msgspec only.

docs/membership.md describes the protocol. A worker uses ``Session``. A launcher uses ``NodeAgent``, and starts
``recover-coordinator`` (``python -m recover_megatron.membership``).
"""

from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import (
    AuthenticationError,
    CoordinatorLost,
    EpochRevoked,
    Fenced,
    MembershipError,
    NoPlan,
    Plan,
    PlanRequest,
    SecretError,
    Settings,
)
from recover_megatron.membership.sides.node_agent import NodeAgent
from recover_megatron.membership.wire import Secret, find_secret

__all__ = [
    "AuthenticationError",
    "CoordinatorLost",
    "EpochRevoked",
    "Fenced",
    "MembershipError",
    "NoPlan",
    "NodeAgent",
    "Plan",
    "PlanRequest",
    "Secret",
    "SecretError",
    "Session",
    "Settings",
    "find_secret",
]
