"""The states of a coordinator, which ``coordinator`` draws and explains."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """See the drawing in ``coordinator``, the only module that changes it."""

    STANDBY = "standby"
    GATHERING = "gathering"
    RENDEZVOUS = "rendezvous"
    STEADY = "steady"
    STOPPED = "stopped"
    RETIRED = "retired"
    """It has stepped down: a fresh one has its place."""
