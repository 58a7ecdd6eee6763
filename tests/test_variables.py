"""What becomes of a user's variables of torch, gloo, NCCL and Python."""

from __future__ import annotations

import pytest

from recover_megatron import variables
from recover_megatron.collectives import torch_nccl
from recover_megatron.variables import TABLE, Rule


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        ("TORCH_GLOO_LAZY_INIT", "1", None),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "INFO"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", None),
        ("NCCL_COMM_BLOCKING", "0", None),
        ("PYTHONINSPECT", "0", None),
    ],
)
def test_a_value_that_recovery_cannot_live_with_is_overruled_and_told(
    name: str, value: str, becomes: str | None
) -> None:
    environ = {name: value, "SOME_OF_MINE": "kept"}
    (said,) = variables.overrule(environ)
    assert said.startswith(f"{name}={value} of your environment is overruled ({becomes or 'not passed on'}")
    assert environ == {"SOME_OF_MINE": "kept"} | ({name: becomes} if becomes else {})
    assert variables.overrule(environ) == [], "once"


def test_other_values_stand_without_a_word() -> None:
    environ = {name: "1" for variable in TABLE if variable.rule in (Rule.KEPT, Rule.DEFAULT) for name in variable.names}
    environ |= {"TORCH_GLOO_LAZY_INIT": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO", "GLOO_DEVICE_TRANSPORT": "TCP"}
    before = dict(environ)
    assert variables.overrule(environ) == []
    assert variables.refusals(environ) == []
    assert environ == before


def test_a_transport_that_cannot_be_aborted_is_refused() -> None:
    (reason,) = variables.refusals({"GLOO_DEVICE_TRANSPORT": "TCP_TLS"})
    assert reason.startswith("GLOO_DEVICE_TRANSPORT=TCP_TLS: only gloo's connections over plain TCP can be aborted")


def test_each_variable_has_one_row_and_those_that_workers_set_for_nccl_have_theirs() -> None:
    rules = [(name, variable.rule) for variable in TABLE for name in variable.names]
    assert len(dict(rules)) == len(rules)
    for name in torch_nccl.environment(60):
        assert dict(rules)[name] is Rule.DEFAULT
