"""Fault injection: deaths and hangs of workers, to check that a run survives them.  Standard library only.

For tests, and to try one fault, a worker can inject a fault into itself at an exact place in the step::

    --recover-inject 5@7:backward:kill

For soak tests, a separate process can send signals to workers at random times::

    python -m recover_megatron.chaos --log-dir DIR --mtbf 60 --seed 1
"""

from recover_megatron.chaos.spec import PHASES, BadSpec, Fault, InjectedFault, Injector, Kind, parse_spec

__all__ = ["PHASES", "BadSpec", "Fault", "InjectedFault", "Injector", "Kind", "parse_spec"]
