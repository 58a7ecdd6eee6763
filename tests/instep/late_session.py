"""pretrain_gpt_recover.py whose sessions connect only while Megatron makes the groups inside the replica."""

import threading
from typing import Any

import pretrain_gpt_recover
from recover_megatron.instep.model_parallel_groups import ModelParallelGroups
from recover_megatron.membership.client import Client
from tests.harness.patience import patient

SECONDS = patient(60)
making, attached = threading.Event(), threading.Event()
dial, connected, make = Client._dial, Client._connected, ModelParallelGroups.make


def late_dial(self: Client, candidate: int) -> None:
    making.wait(SECONDS)
    dial(self, candidate)


def noted_connected(self: Client) -> None:
    connected(self)
    attached.set()


def noted_make(self: ModelParallelGroups, create: Any) -> Any:
    def created() -> Any:
        making.set()
        attached.wait(SECONDS)
        return create()

    return make(self, created)


Client._dial, Client._connected = late_dial, noted_connected  # type: ignore[method-assign]
ModelParallelGroups.make = noted_make  # type: ignore[method-assign]
pretrain_gpt_recover.main()
