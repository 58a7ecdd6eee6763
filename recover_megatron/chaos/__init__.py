"""Fault injection: deaths and hangs on demand, to check that a run survives them.  Standard library only.

A worker injects a fault into itself at an exact place in the step, for tests and for trying one fault::

    --recover-inject 5@7:backward:kill

A separate process sends signals to workers at random times, for soak tests::

    python -m recover_megatron.chaos --log-dir DIR --mtbf 60 --seed 1
"""

from recover_megatron.chaos.spec import PHASES, BadSpec, Fault, InjectedFault, Injector, Kind, parse_spec

__all__ = ["PHASES", "BadSpec", "Fault", "InjectedFault", "Injector", "Kind", "parse_spec"]
