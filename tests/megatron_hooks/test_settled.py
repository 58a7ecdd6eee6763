"""Flags that are switched off, or done in another way, with --recover: what is set, and that it is said."""

from __future__ import annotations

import argparse

import pytest
from megatron.training.arguments import add_megatron_arguments

from recover_megatron import hostdevice
from recover_megatron.arguments import RecoverConfig
from recover_megatron.megatron_hooks.entry import flags, settled
from recover_megatron.megatron_hooks.entry.flags import arguments_provider
from recover_megatron.megatron_hooks.refused import cannot_recover, cannot_shard

FLAGS = (
    "--rerun-mode validate_results --fp16 --moe-token-dispatcher-type flex --cuda-graph-impl transformer_engine "
    "--tp-comm-overlap --overlap-moe-expert-parallel-comm --delay-wgrad-compute --use-sharp --use-nccl-ub "
    "--overlap-param-gather-with-optimizer-step --log-straggler --log-max-attention-logit --error-injection-rate 9 "
    "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --optimizer muon --use-distributed-optimizer "
    "--use-megatron-fsdp --fsdp-double-buffer --use-precision-aware-optimizer"
).split()
SETTLED = [its for its in settled.SETTLED if its.flag != "--optimizer dist_muon"]
"""Each of these by one of the flags."""


def parsed(enabled: bool, *flags: str) -> argparse.Namespace:
    config = RecoverConfig(enabled=enabled)
    parser = arguments_provider(config)(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    return parser.parse_args(list(flags))


def test_every_flag_that_is_done_in_another_way_is_set_so_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled.say.cache_clear()
    said: list[str] = []
    monkeypatch.setattr(settled.log, "info", said.append)
    args = parsed(True, *FLAGS)
    assert all(not its.given(args) for its in settled.SETTLED)
    assert (args.moe_token_dispatcher_type, args.cuda_graph_impl) == ("alltoall", "none")
    assert (args.optimizer, args.use_distributed_optimizer, args.fp8_param_gather) == ("muon", False, False)
    assert (args.num_distributed_optimizer_instances, args.error_injection_rate) == (2, 0)
    assert (args.rerun_mode, args.accumulate_allreduce_grads_in_fp32) == ("disabled", True)
    parsed(True, *FLAGS)
    assert said == [f"with --recover {its}" for its in SETTLED]
    config = RecoverConfig(enabled=True)
    assert [*cannot_recover(args, config), *cannot_shard(args, config)] == []


def test_without_recover_every_flag_is_as_megatron_has_it() -> None:
    args = parsed(False, *FLAGS)
    assert all(its.given(args) for its in SETTLED)


def test_the_old_name_of_spread_muon_is_muon_that_is_not_spread() -> None:
    args = parsed(True, "--optimizer", "dist_muon", "--overlap-param-gather")
    assert (args.optimizer, args.use_distributed_optimizer, args.overlap_param_gather) == ("muon", False, False)
    assert settled.not_settled(args) == []


@pytest.mark.parametrize(
    ("on_host", "backend", "collective", "told"),
    [
        (True, "gloo", "ring", []),
        (False, "nccl", "native", []),
        (True, "gloo", "native", ["--recover-collective native"]),
        (False, "gloo", "auto", ["--distributed-backend gloo"]),
    ],
)
def test_gradients_travel_by_the_ring_on_the_cpu_and_over_nccl_on_gpus(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, backend: str, collective: str, told: list[str]
) -> None:
    args = parsed(True, "--distributed-backend", backend)
    monkeypatch.setattr(hostdevice, "is_active", lambda: on_host)
    found = cannot_recover(args, RecoverConfig(enabled=True, collective=collective))
    assert len(found) == len(told)
    assert all(flag in reason for flag, reason in zip(told, found, strict=True))


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon", "lion"])
def test_a_package_that_an_optimizer_needs_and_that_is_not_here_is_named(
    monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    monkeypatch.setattr(flags, "_installed", lambda module: module != "emerging_optimizers")
    reasons = flags.problems(parsed(True, "--optimizer", optimizer), RecoverConfig(enabled=True))
    wanted = "--optimizer {} needs the Python package emerging-optimizers, which is not installed"
    assert any(wanted.format(optimizer.removeprefix("dist_")) in reason for reason in reasons)


def test_what_comes_past_the_parser_is_refused_and_not_run_as_it_is() -> None:
    args = parsed(False, *FLAGS)
    assert len(settled.not_settled(args)) == len(SETTLED)
    assert settled.not_settled(parsed(True, *FLAGS)) == []
    args.yaml_cfg = "model.yaml"
    reasons = flags.problems(args, RecoverConfig(enabled=True))
    assert any("--moe-token-dispatcher-type flex from a file of --yaml-cfg" in reason for reason in reasons)


def test_a_flag_that_was_not_given_is_not_touched() -> None:
    with_recover, without = vars(parsed(True)), vars(parsed(False))
    assert {name for name in without if with_recover[name] != without[name]} <= {"rerun_mode"}


@pytest.mark.parametrize(("flags", "taken"), [("--bf16", True), ("", False), ("--bf16 --use-megatron-fsdp", False)])
def test_the_largest_attention_logit_is_logged_where_megatron_finds_it(flags: str, taken: bool) -> None:
    assert parsed(True, "--log-max-attention-logit", *flags.split()).log_max_attention_logit is taken


AWARE = "--use-precision-aware-optimizer --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [("--qk-clip --bf16", None), ("--qk-clip", "--qk-clip needs --bf16 or --fp16"),
     ("--qk-clip --fp16 --tensor-model-parallel-size 2 --multi-latent-attention", None),
     ("--qk-clip --bf16 --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 needs --multi-latent"),
     ("--optimizer muon --tensor-model-parallel-size 2", None),
     ("--optimizer muon --muon-tp-mode duplicated", None),
     ("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode duplicated", "--muon-tp-mode duplicated"),
     (f"{AWARE} --main-params-dtype fp16", "with --use-precision-aware-optimizer yet"),
     (f"{AWARE} --exp-avg-sq-dtype fp8", "with --use-precision-aware-optimizer yet"),
     (f"{AWARE} --optimizer-cpu-offload", "with --use-precision-aware-optimizer yet")],
)  # fmt: skip
def test_what_trains_otherwise_or_asks_others_in_the_update_or_ends_megatron_itself_is_refused(
    flags: str, reason: str | None
) -> None:
    args, config = parsed(True, *flags.split()), RecoverConfig(enabled=True)
    found = [*cannot_recover(args, config), *cannot_shard(args, config)]
    assert any(reason in its for its in found) if reason else found == []
