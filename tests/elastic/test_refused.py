"""What cannot be trained so is refused with all reasons, before anything is connected."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from recover_megatron import ElasticDataParallel
from recover_megatron.errors import UserError


def test_all_reasons_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOVER_COORDINATOR", raising=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UserError) as refused:
        ElasticDataParallel(model, optimizer, microbatches=0, state={"model": optimizer})
    reasons = refused.value.reasons
    assert [reason.split(":")[0] for reason in reasons] == [
        "this process has no coordinator", "microbatches is 0", "1", "state"
    ]  # fmt: skip


def test_the_package_has_three_names_and_imports_torch_for_them_alone() -> None:
    code = (
        "import sys, recover_megatron as r; assert r.__version__ and not hasattr(r, 'walk'); "
        "assert 'torch' not in sys.modules; print(r.ElasticDataParallel, r.StepResult, r.run)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "recover_megatron.elastic.data_parallel.ElasticDataParallel" in said
    assert "function run" in said
