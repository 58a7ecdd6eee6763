"""What only a GPU needs, as far as it can be looked at without one."""

from __future__ import annotations

from recover_megatron.collectives.torch_nccl import ENVIRONMENT, set_environment


def test_torchs_watchdog_is_off_unless_the_user_wants_it() -> None:
    environ: dict[str, str] = {}
    assert set_environment(environ) == []
    assert environ == ENVIRONMENT
    environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    assert set_environment(environ) == ["TORCH_NCCL_ASYNC_ERROR_HANDLING=3"]
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
