"""The functions that are wrapped in Megatron-Bridge: as its releases have them, and as the double has them.

RECOVER_BRIDGE_SOURCE names a checkout of Megatron-Bridge, or an unpacked wheel, to compare with besides.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.arguments import RecoverConfig
from recover_megatron.instep.faults import Disagreement
from recover_megatron.megatron_hooks.loops import bridge
from recover_megatron.megatron_hooks.loops.bridge_arguments import SECTIONS, BridgeArguments
from scripts.bridge_seams import misfits, signatures
from tests.harness import REPOSITORY

RELEASES = json.loads((Path(__file__).parent / "bridge_parameters.json").read_text(encoding="utf-8"))
DOUBLE = REPOSITORY / "tests" / "doubles" / "bridge"


def parameters_of(release: str) -> dict[str, list[str] | None]:
    return {name: its.split() for name, its in RELEASES[release].items()}


@pytest.mark.parametrize("release", RELEASES)
def test_every_function_that_is_wrapped_is_in_the_recorded_releases(release: str) -> None:
    assert misfits(parameters_of(release), bridge.seams()) == []


def test_a_function_that_is_gone_or_takes_other_arguments_is_named() -> None:
    found = parameters_of("0.6.2")
    step, setup = f"{bridge.TRAIN}.train_step", f"{bridge.PRETRAIN}.setup"
    found |= {step: ["forward_step_func", "model"], setup: None}
    gone, other = misfits(found, bridge.seams())
    assert gone == f"there is no {setup}"
    assert other.startswith(f"{step} takes (forward_step_func, model), expected (forward_step_func, data_iterator, ")


def test_the_double_takes_what_bridge_takes_in_the_same_order() -> None:
    theirs = parameters_of("0.6.2")
    for name, its in signatures(DOUBLE, bridge.seams()).items():
        assert its is not None, f"the double has no {name}"
        if every := theirs[name]:  # else it is Megatron-LM's or Megatron-Core's own
            assert [one for one in every if one in its] == its, name


@pytest.mark.skipif("RECOVER_BRIDGE_SOURCE" not in os.environ, reason="RECOVER_BRIDGE_SOURCE names no sources")
def test_every_function_that_is_wrapped_is_in_these_sources() -> None:
    root = Path(os.environ["RECOVER_BRIDGE_SOURCE"])
    root = root / "src" if (root / "src").is_dir() else root
    assert misfits(signatures(root, bridge.seams()), bridge.seams()) == []


def test_bridges_configuration_is_read_and_set_by_the_names_of_megatrons_flags() -> None:
    train_state = SimpleNamespace(step=3, consumed_train_samples=24, floating_point_operations_so_far=7)
    config = SimpleNamespace(**{section: SimpleNamespace() for section in SECTIONS}, data_parallel_size=4)
    config.model.num_moe_experts, config.rng.seed, config.optimizer.optimizer = 8, 5, "adam"
    config.checkpoint.ckpt_assume_constant_structure = True
    arguments: Any = BridgeArguments(config)
    arguments.attach(config, train_state)
    arguments.loaded()
    assert (arguments.num_experts, arguments.seed, arguments.optimizer) == (8, 5, "adam")
    assert (arguments.iteration, arguments.consumed_train_samples, arguments.data_parallel_size) == (3, 24, 4)
    assert getattr(arguments, "mtp_num_layers", None) is None
    arguments.ckpt_assume_constant_structure = False
    arguments.consumed_train_samples = 32
    assert config.checkpoint.ckpt_assume_constant_structure is False
    assert train_state.consumed_train_samples == 32
    arguments.iteration, arguments.num_floating_point_operations_so_far = 4, 9
    assert (train_state.step, train_state.floating_point_operations_so_far) == (3, 7)  # Bridge counts by itself
    arguments.entered()
    assert (train_state.step, train_state.floating_point_operations_so_far) == (4, 9)


def test_a_worker_that_counts_other_samples_than_a_batch_does_not_begin_the_next_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge, "get_current_running_global_batch_size", lambda: 8)
    run = bridge.BridgeRun(None, None, None, RecoverConfig())
    counted = SimpleNamespace(step=0, consumed_train_samples=0)
    run.arguments.attach(None, counted)
    run._count()
    counted.step, counted.consumed_train_samples = 1, 8
    run._count()
    assert run.arguments.curr_iteration == 1
    counted.consumed_train_samples = 12
    with pytest.raises(Disagreement, match="counts 12 samples before this iteration, they are 16"):
        run._count()
