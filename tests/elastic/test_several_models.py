"""Several models and optimizers in one run: their state, what is refused of them, and the example of the docs."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from recover_megatron import ElasticDataParallel, run
from recover_megatron.elastic.checks import check
from recover_megatron.elastic.run_state import Optimizers, State
from recover_megatron.errors import UserError
from tests.harness import REPOSITORY
from tests.membership.cluster import Cluster, cluster

PAGE = REPOSITORY / "docs" / "integrate.md"


def two(lr: float = 0.1) -> tuple[torch.nn.ModuleList, Optimizers]:
    models = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)])
    return models, Optimizers([torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for model in models])


def test_the_state_of_several_is_by_number_and_comes_back() -> None:
    models, optimizers = two()
    sum(model.weight.sum() for model in models).backward()
    optimizers.step()
    state = State({"model": models, "optimizer": optimizers})
    tree = copy.deepcopy(state.tree())
    assert list(tree["model"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(tree["optimizer"]) == ["0", "1"]
    others = State(dict(zip(("model", "optimizer"), two(), strict=True)))
    assert others.digest() != state.digest()
    others.load(tree)
    assert others.digest() == state.digest()


def test_all_optimizers_step_and_their_groups_are_those_of_a_scheduler() -> None:
    models, optimizers = two(lr=1.0)
    before = [model.weight.detach().clone() for model in models]
    (models[0].weight.sum() + 2 * models[1].weight.sum()).backward()
    for group in optimizers.param_groups:
        group["lr"] = 0.5
    optimizers.step()
    for model, old, moved in zip(models, before, (0.5, 1.0), strict=True):
        torch.testing.assert_close(old - model.weight, torch.full_like(old, moved))


@pytest.mark.parametrize("given", [{"state": {}, "param_groups": []}, {"0": {}}, {"0": {}, "1": {}, "2": {}}])
def test_the_state_of_another_number_of_optimizers_is_not_loaded(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected \['0', '1'\]"):
        two()[1].load_state_dict(given)


def reasons(models: torch.nn.ModuleList, optimizers: Optimizers, again: bool = False) -> list[str]:
    with pytest.raises(UserError) as error:
        check(models, optimizers, list(models.parameters()), 1, {}, again=again)
    return [reason for reason in error.value.reasons if "no coordinator" not in reason]


def test_each_optimizer_of_a_list_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOVER_COORDINATOR", raising=False)
    models, optimizers = two()
    models[1].weight = models[0].weight  # shared by two models
    adam = torch.optim.Adam([models[1].bias])
    assert reasons(models, Optimizers([optimizers.optimizers[0], adam])) == []
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    lbfgs = torch.optim.LBFGS(models[0].parameters())
    said = reasons(models, Optimizers([optimizers.optimizers[0], stranger, lbfgs]))
    assert [reason[:40] for reason in said] == [
        "the optimizer has 1 parameter(s) that ar", "2 parameter(s) are in several optimizers",
        "LBFGS needs a closure, which recomputes ",
    ]  # fmt: skip


def test_a_second_one_in_a_process_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECOVER_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setattr(ElasticDataParallel, "_made", True)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(SystemExit, match="2"):
        ElasticDataParallel(model, torch.optim.SGD(model.parameters()), microbatches=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "has created an ElasticDataParallel before" in line
    assert "ElasticDataParallel([model_a, model_b], [optimizer_a, optimizer_b], ...)" in line


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A coordinator for this process as the one worker."""
    with cluster(tmp_path) as made:
        made.start_coordinators(1)
        ((host, port),) = made.addresses
        monkeypatch.setenv("RECOVER_COORDINATOR", f"{host}:{port}")
        monkeypatch.setenv("RECOVER_WORKER_ID", "0")
        monkeypatch.setenv("RECOVER_SECRET_FILE", str(made.secret_file))
        monkeypatch.setattr(ElasticDataParallel, "_made", False)
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        yield made


def noise(step: int, j: int) -> torch.Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(100 * step + j))


def names() -> dict[str, Any]:
    """What the example of the docs takes for granted."""
    torch.manual_seed(1)
    nets = {"generator": torch.nn.Linear(2, 3), "discriminator": torch.nn.Linear(3, 1)}
    made = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets.values()]
    real = {"real": lambda step, j: noise(step, j)[:, [0, 1, 0]] + 1}
    more = {"optimizer_g": made[0], "optimizer_d": made[1], "softplus": softplus, "noise": noise}
    return {"torch": torch, "ElasticDataParallel": ElasticDataParallel, **nets, **real, **more}


def test_the_generator_and_the_discriminator_of_the_docs_take_turns_as_in_a_loop_of_ones_own(control: Cluster) -> None:
    (code,) = re.findall(r"(?ms)^### Train several models$.*?^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    its, own = names(), {**names(), "ElasticDataParallel": lambda *of, **how: None}
    exec(code, its)
    exec(code, own)
    for done in run(its["elastic"], its["microbatch"], 4):
        for j in range(16):
            (own["microbatch"](done.step, j) / 16).backward()
        turn, other = ("discriminator", "generator") if done.step % 2 else ("generator", "discriminator")
        assert own[other].weight.grad is None
        own[f"optimizer_{turn[0]}"].step()
        own[turn].zero_grad()
        for net in ("generator", "discriminator"):
            for mine, wanted in zip(its[net].parameters(), own[net].parameters(), strict=True):
                torch.testing.assert_close(mine, wanted)
    assert ElasticDataParallel._made, "a second one would be refused"
