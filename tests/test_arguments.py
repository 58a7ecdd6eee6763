"""The --recover-* flags and where each value goes; flags of the script that must be alike; a user's variables."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from recover_megatron import variables
from recover_megatron.arguments import (
    COORDINATOR_VARIABLE,
    LOG_DIR_VARIABLE,
    RecoverConfig,
    add_recover_arguments,
    config_from_argv,
    parse_addresses,
    problems,
)
from recover_megatron.collectives import torch_nccl
from recover_megatron.errors import UserError
from recover_megatron.launch.command_line.script import Script
from recover_megatron.membership import Settings
from recover_megatron.script_flags import MOST_NAMED, codes, differences, digest, flags_of, listed
from recover_megatron.variables import TABLE, Rule


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (COORDINATOR_VARIABLE, LOG_DIR_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


def test_without_flags_the_config_is_its_defaults_and_they_are_fine() -> None:
    assert config_from_argv([]) == RecoverConfig()
    assert problems(RecoverConfig()) == []


def test_the_default_times_are_those_of_the_protocol() -> None:
    config, settings = RecoverConfig(), Settings()
    assert config.heartbeat_interval == settings.heartbeat_interval
    assert config.heartbeat_timeout == settings.heartbeat_timeout
    assert config.hang_timeout == settings.hang_timeout
    assert config.stall_timeout == settings.stall_timeout


def test_every_flag_reaches_the_config_among_flags_of_others() -> None:
    line = """--num-layers 2 --recover --recover-log-dir runs/a --recover-device cpu --recover-coordinator a:1,b:2
        --recover-heartbeat-interval 0.5 --recover-heartbeat-timeout 2 --recover-hang-timeout=30 --bf16
        --recover-collective native --recover-min-replicas 3 --recover-inject 5@7:backward:kill --recover-balance
        --recover-spares 2 --recover-allow-cross-node-tp --recover-verify-interval 50"""
    assert config_from_argv(line.split()) == RecoverConfig(
        enabled=True,
        log_dir=Path("runs/a"),
        device="cpu",
        coordinator="a:1,b:2",
        heartbeat_interval=0.5,
        heartbeat_timeout=2.0,
        hang_timeout=30.0,
        collective="native",
        min_replicas=3,
        inject="5@7:backward:kill",
        balance=True,
        spares=2,
        allow_cross_node_tp=True,
        verify_interval=50,
    )


def test_the_coordinator_comes_from_the_launcher_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(COORDINATOR_VARIABLE, "launcher:1")
    assert config_from_argv([]).coordinator == "launcher:1"
    assert config_from_argv(["--recover-coordinator", "mine:2"]).coordinator == "mine:2"
    monkeypatch.setenv(COORDINATOR_VARIABLE, "")
    assert config_from_argv([]).coordinator is None


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--recover-heartbeat-interval", "0"], "--recover-heartbeat-interval 0: give a number of seconds above 0"),
        (["--recover-heartbeat-interval", "nan"], "--recover-heartbeat-interval nan: give a number"),
        (["--recover-hang-timeout", "inf"], "--recover-hang-timeout inf: give a number of seconds above 0"),
        (["--recover-heartbeat-interval", "3"], "--recover-heartbeat-timeout 5 must be at least twice"),
        (["--recover-stall-timeout", "-1"], "--recover-stall-timeout -1: give a number of seconds, 0 or more"),
        (["--recover-grace", "1"], "--recover-grace 1 must be at least twice --recover-heartbeat-interval 1"),
        (["--recover-grace", "60"], "below --recover-hang-timeout 60"),
        (["--recover-hang-timeout", "4"], "--recover-hang-timeout 4 must not be below --recover-heartbeat-timeout 5"),
        (["--recover-min-replicas", "0"], "--recover-min-replicas 0: give 1 or more"),
        (["--recover-spares", "-1"], "--recover-spares -1: give 0 or more"),
        (["--recover-verify-interval", "-5"], "--recover-verify-interval -5: give 0 or more"),
        (["--recover-coordinator", "host"], "'host' is not HOST:PORT"),
        (["--recover-coordinator", "a:1,b:x"], "'b:x' is not HOST:PORT"),
        (["--recover-metrics", "70000"], "--recover-metrics 70000: give a port (1 to 65535) or HOST:PORT"),
        (["--recover-metrics", "9400,9401"], "--recover-metrics 9400,9401: give a port (1 to 65535) or HOST:PORT"),
        (["--recover-metrics-file", ""], "--recover-metrics-file : give the path of a file"),
        (["--recover-on-event", " "], "--recover-on-event  : give a command"),
    ],
)
def test_a_bad_value_is_refused_with_the_remedy(flags: list[str], refusal: str) -> None:
    (problem,) = problems(config_from_argv(flags))
    assert refusal in problem


def test_all_bad_values_are_refused_together() -> None:
    flags = "--recover-heartbeat-interval -1 --recover-hang-timeout 1 --recover-min-replicas 0 --recover-coordinator x"
    assert len(problems(config_from_argv(flags.split()))) == 4


@pytest.mark.parametrize(
    "flags",
    [["--recover-heartbeat-interval", "soon"], ["--recover-collective", "tree"], ["--recover-min-replicas", "1.5"]],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(flags: list[str]) -> None:
    with pytest.raises(UserError, match=flags[0]):
        config_from_argv(flags)


def test_the_timeouts_may_be_as_tight_as_the_rules_allow() -> None:
    assert problems(RecoverConfig(heartbeat_interval=1, heartbeat_timeout=2, hang_timeout=2)) == []


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "a:1,", "a:1;b:2", "::1:7", "[]:7", "a:¹"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_addresses(text)


def test_addresses_keep_their_order() -> None:
    assert parse_addresses("b:2, a:65535,[::1]:7") == [("b", 2), ("a", 65535), ("::1", 7)]


def test_the_launcher_takes_the_scripts_times_and_leaves_refusing_to_the_script() -> None:
    assert Script.read("", ["--recover-heartbeat-interval", "0.5"]).times.heartbeat_interval == 0.5
    for bad in (["--recover-heartbeat-interval", "9"], ["--recover-heartbeat-interval", "x"]):
        assert Script.read("", [*bad, "--recover-hang-timeout", "90"]).times == RecoverConfig()


def test_spares_are_started_only_for_a_run_that_can_use_them() -> None:
    assert Script.read("", ["--recover", "--recover-spares", "2"]).spares == 2
    for none in (["--recover-spares", "2"], ["--recover", "--recover-spares", "-2"], ["--recover-spares", "x"]):
        assert Script.read("", none).spares == 0


def test_an_address_that_the_launcher_replaces_does_not_cost_the_scripts_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COORDINATOR_VARIABLE, "nonsense")
    assert Script.read("", ["--recover-hang-timeout", "90"]).times.hang_timeout == 90.0


def test_the_help_names_every_flag_and_its_default() -> None:
    text = add_recover_arguments(argparse.ArgumentParser(prog="x")).format_help()
    for flag in ("coordinator", "heartbeat-interval", "heartbeat-timeout", "hang-timeout", "collective"):
        assert f"--recover-{flag}" in text
    assert "(default: 60.0)" in text


ARGV = ["data/", "--lr", "1e-3", "--data-path", "0.5", "/here/data/corpus", "--bf16", "--recover-log-dir", "logs"]


@pytest.mark.parametrize(
    "same",
    [
        ["data", "--bf16", "--lr=0.001", "--data-path", "0.50", "/there/corpus"],
        [*ARGV, "--tensorboard-dir", "/tmp/here", "--recover-inject", "1@2:forward", "--wandb-exp-name=mine"],
        ["data", "--lr", "0.0010", "--data_path", "0.5", "corpus", "--bf16", "--num-workers", "7"],
    ],
)
def test_order_spelling_folders_and_what_is_a_workers_own_make_no_difference(same: list[str]) -> None:
    assert differences(flags_of(same), flags_of(ARGV)) == []
    assert digest(flags_of(same)) == digest(flags_of(ARGV))
    assert codes(flags_of(same)) == codes(flags_of(ARGV))


@pytest.mark.parametrize(
    ("other", "said", "hidden"),
    [
        (["--lr", "-2"], "--lr -2.0 (the run: 0.001)", "--lr has another value"),
        ([], "--lr is missing (the run: 0.001)", "--lr is missing"),
        (["--lr", "1e-3", "--fp16"], "--fp16 is not given to the run", "--fp16 is not given to the run"),
        (["--lr", "1e-3", "1"], "--lr 0.001 1.0 (the run: 0.001)", "--lr has another value"),
        (["extra", "--lr", "1e-3"], "the arguments before the first flag extra is not given to the run",
         "the arguments before the first flag is not given to the run"),
    ],
)  # fmt: skip
def test_a_difference_is_told_by_flag_with_both_values(other: list[str], said: str, hidden: str) -> None:
    mine, theirs = flags_of(other), flags_of(["--lr", "1e-3"])
    assert differences(mine, theirs) == [said]
    assert differences(codes(mine), codes(theirs), shown=False) == [hidden]
    assert digest(mine) != digest(theirs)


def test_what_may_differ_is_not_compared_and_long_lists_are_cut() -> None:
    assert differences(flags_of(["--lr", "1"], ["--lr"]), flags_of(["--lr", "2"], ["lr", ""])) == []
    many = flags_of([f"--flag-{n}" for n in range(MOST_NAMED + 2)])
    assert listed(differences(many, {})).endswith(", and 2 more")
    assert len(differences({"--x": "y" * 100}, {})[0]) < 100


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
    assert said.startswith(f"{name}={value} in the environment is overruled ({becomes or 'removed'}")
    assert environ == {"SOME_OF_MINE": "kept"} | ({name: becomes} if becomes else {})
    assert variables.overrule(environ) == [], "once"


def test_other_values_stand_without_a_word() -> None:
    environ = {name: "1" for variable in TABLE if variable.rule in (Rule.KEPT, Rule.DEFAULT) for name in variable.names}
    environ |= {"TORCH_GLOO_LAZY_INIT": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO", "GLOO_DEVICE_TRANSPORT": "TCP"}
    environ |= {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "0"}
    before = dict(environ)
    assert variables.overrule(environ) == []
    assert variables.refusals(environ) == []
    assert environ == before


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("GLOO_DEVICE_TRANSPORT", "TCP_TLS", "recovery can abort only plain TCP connections of gloo"),
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1", "the first groups would use torchcomms"),
    ],
)
def test_groups_that_cannot_be_aborted_are_refused(name: str, value: str, why: str) -> None:
    (reason,) = variables.refusals({name: value})
    assert reason.startswith(f"{name}={value}: {why}")
    assert reason.endswith(": unset the variable, or train without --recover")


def test_each_variable_has_one_row_and_those_that_workers_set_for_nccl_have_theirs() -> None:
    rules = [(name, variable.rule) for variable in TABLE for name in variable.names]
    assert len(dict(rules)) == len(rules)
    for name in torch_nccl.environment(60):
        assert dict(rules)[name] is Rule.DEFAULT
