"""Which flags of two workers must be the same, and how a difference is told."""

from __future__ import annotations

import pytest

from recover_megatron.script_flags import MOST_NAMED, codes, differences, digest, flags_of, listed

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
        (["extra", "--lr", "1e-3"], "the words before the first flag extra is not given to the run",
         "the words before the first flag is not given to the run"),
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
