"""pretrain_gpt_recover.py on the CPU, whose gradients travel over NCCL's double: over_nccl.py SETTINGS flags...

SETTINGS: a JSON object, what ``tests.doubles.nccl.library`` takes, and which collective ("native" or "ring").  A
worker's log tells which calls of NCCL's made and ended its communicators.
"""

import json
import sys
from typing import Any

import pretrain_gpt_recover
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.instep.epoch_groups import CommunicationConfig
from recover_megatron.megatron_hooks.entry import fault_tolerance
from tests.doubles.nccl import library as nccl_double

its = json.loads(sys.argv.pop(1))
collective = its.pop("collective")
double = nccl_double(**its)


class Told(list[str]):
    def append(self, call: str) -> None:
        print("NCCL's double:", call, flush=True)
        super().append(call)


def over_nccl(**settings: Any) -> CommunicationConfig:
    return CommunicationConfig(**settings | {"transport_kind": "nccl", "collective": collective})


libraries.load = lambda: double  # type: ignore[assignment]
fault_tolerance.CommunicationConfig = over_nccl  # type: ignore[assignment,misc]
double.core.calls = Told()
pretrain_gpt_recover.main()
