"""What a group remembers of its plans."""

from __future__ import annotations

from recover_megatron.collectives.group import Memo


def test_a_result_is_made_once_and_all_are_forgotten_when_they_weigh_too_much() -> None:
    made: list[str] = []

    def make(text: str) -> str:
        made.append(text)
        return text

    memo: Memo[str] = Memo(4, len)
    for text in ("ab", "cd", "ab", "cd"):
        assert memo.get(text, lambda text=text: make(text)) == text  # type: ignore[misc]
    assert (made, len(memo)) == (["ab", "cd"], 2)
    assert memo.get("e", lambda: make("e")) == "e"
    assert len(memo) == 1
    assert memo.get("longer", lambda: make("longer")) == "longer"
    assert memo.get("longer", lambda: make("again")) == "longer"
