"""What only a GPU needs, as far as it can be looked at without one."""

from __future__ import annotations

from typing import Any

import torch

from recover_megatron.collectives.nccl import ENVIRONMENT, set_environment


def test_torchs_watchdog_is_off_unless_the_user_wants_it() -> None:
    environ: dict[str, str] = {}
    assert set_environment(environ) == []
    assert environ == ENVIRONMENT
    environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    assert set_environment(environ) == ["TORCH_NCCL_ASYNC_ERROR_HANDLING=3"]
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_shadows_on_the_host_are_clipped_like_what_they_are_shadows_of() -> None:
    from recover_megatron.megatron_hooks.sharded_optimizer import by_device

    given: list[Any] = []

    def megatrons(parameters: list[torch.Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool) -> None:
        assert not use_decoupled_grad
        given.extend(parameters)

    shadow, own = torch.zeros(2), torch.zeros(2, device="meta")
    shadow.grad = torch.tensor([3.0, 4.0])
    by_device(megatrons)([shadow, own], 1.0, 2.0, use_decoupled_grad=False)
    assert [one.device.type for one in given] == ["meta"]
    assert torch.allclose(shadow.grad, torch.tensor([1.5, 2.0]))

    given.clear()
    by_device(megatrons)([shadow], 1.0, 0.5, use_decoupled_grad=False)  # short enough as it is
    assert given == []
    assert torch.allclose(shadow.grad, torch.tensor([1.5, 2.0]))
