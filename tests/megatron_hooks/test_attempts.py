"""Folders of attempts at a checkpoint: renamed once, whoever does it how often and how late, and removed when old."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.instep import hooks
from recover_megatron.megatron_hooks.checkpoint import attempts
from recover_megatron.megatron_hooks.checkpoint.attempts import Attempt, clean, publish
from recover_megatron.megatron_hooks.data import children
from tests.harness.waiting import eventually

FIRST = Attempt(8, term=0x1ABCDEF01, epoch=3, decision=17)
SECOND = Attempt(8, term=0x1ABCDEF01, epoch=4, decision=17)


def written(parent: Path, attempt: Attempt, text: str) -> tuple[str, str]:
    """The folder of an attempt, with a file, and what it is to be."""
    final = str(parent / "iter_0000008")
    folder = Path(attempt.folder(final))
    (folder / "mp_rank_00").mkdir(parents=True)
    (folder / "mp_rank_00" / "model.pt").write_text(text)
    return str(folder), final


@pytest.fixture
def older(tmp_path: Path) -> None:
    """There is a checkpoint of an earlier run."""
    (tmp_path / "iter_0000008").mkdir()
    (tmp_path / "iter_0000008" / "old").touch()


def content(final: str) -> str:
    return (Path(final) / "mp_rank_00" / "model.pt").read_text()


def test_a_complete_attempt_gets_its_name_once(tmp_path: Path) -> None:
    folder, final = written(tmp_path, FIRST, "new")
    publish(folder, final)
    publish(folder, final)  # another worker, or the same one that has slept
    assert os.listdir(tmp_path) == ["iter_0000008"]
    assert content(final) == "new"


@pytest.mark.usefixtures("older")
def test_what_an_earlier_run_has_left_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder, final = written(tmp_path, FIRST, "new")
    publish(folder, final)
    assert os.listdir(tmp_path) == ["iter_0000008"]
    assert os.listdir(final) == ["mp_rank_00"]


def test_a_link_to_another_disk_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old").touch()
    (tmp_path / "iter_0000008").symlink_to("elsewhere")
    folder, final = written(tmp_path, FIRST, "new")
    publish(folder, final)
    assert content(final) == "new"
    assert not os.path.islink(final)
    assert os.listdir(tmp_path / "elsewhere") == ["old"]


@pytest.mark.usefixtures("older")
def test_an_attempt_that_is_gone_leaves_the_checkpoint_of_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two do it at once, where there is an older checkpoint: the slower one is stopped between its two renames."""
    folder, final = written(tmp_path, FIRST, "new")
    rename, stopped = os.rename, []

    def stopping(source: str, target: str) -> None:
        if target.endswith(".replaced") and not stopped:
            stopped.append(source)
            publish(folder, final)
        rename(source, target)

    monkeypatch.setattr(attempts.os, "rename", stopping)
    publish(folder, final)
    assert stopped
    assert content(final) == "new"
    assert os.listdir(tmp_path) == ["iter_0000008"]


def test_nothing_is_taken_for_a_checkpoint_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        publish(FIRST.folder(str(tmp_path / "iter_0000008")), str(tmp_path / "iter_0000008"))


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EMFILE, errno.ENFILE, errno.EPERM])
def test_a_file_system_that_renames_no_folders_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some say that they cannot, others that a folder has too many files: all of them would have to be open."""
    folder, final = written(tmp_path, FIRST, "new")
    refuse_to_rename(monkeypatch, number)
    publish(folder, final)
    publish(folder, final)  # there is no attempt any more
    assert content(final) == "new"
    assert os.listdir(tmp_path) == ["iter_0000008"]
    assert os.listdir(final) == ["mp_rank_00"]


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMFILE])
def test_an_older_checkpoint_that_alone_cannot_be_renamed_is_replaced_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It lies in a lower layer of a container's overlayfs, or has too many files."""
    folder, final = written(tmp_path, FIRST, "new")
    rename = os.rename

    def refuse(source: str, target: str) -> None:
        if os.path.exists(os.path.join(source, "old")):
            raise OSError(number, os.strerror(number), source, None, target)
        rename(source, target)

    monkeypatch.setattr(attempts.os, "rename", refuse)
    publish(folder, final)
    assert content(final) == "new"
    assert os.listdir(tmp_path) == ["iter_0000008"]
    assert os.listdir(final) == ["mp_rank_00"]


@pytest.mark.usefixtures("older")
def test_what_is_no_refusal_is_told_and_what_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, final = written(tmp_path, FIRST, "new")
    refuse_to_rename(monkeypatch, errno.ESTALE)
    with pytest.raises(OSError, match="iter_0000008") as raised:
        publish(folder, final)
    assert raised.value.errno == errno.ESTALE
    assert os.listdir(final) == ["old"]


def refuse_to_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(number, os.strerror(number), source, None, target)

    monkeypatch.setattr(attempts.os, "rename", refuse)


def test_what_attempts_before_this_one_have_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    later = Attempt(12, FIRST.term, 9, 40)
    under_way = Attempt(4, FIRST.term, 2, 9)
    for attempt in (FIRST, SECOND, later, under_way, Attempt(6, 7, 1, 1)):
        written(tmp_path, attempt, "part")
    Path(f"{FIRST.folder(str(tmp_path / 'x'))}.replaced").mkdir()
    (tmp_path / "attempt_of_mine").mkdir()
    (tmp_path / "iter_0000004").mkdir()
    clean(str(tmp_path), SECOND, [under_way])
    left = {Path(attempt.folder(str(tmp_path / "x"))).name for attempt in (SECOND, later, under_way)}
    assert set(os.listdir(tmp_path)) == {*left, "attempt_of_mine", "iter_0000004"}
    clean(str(tmp_path / "not there yet"), SECOND, [])


def test_no_late_attempt_removes_a_newer_one(tmp_path: Path) -> None:
    written(tmp_path, SECOND, "part")
    clean(str(tmp_path), FIRST, [])
    assert len(os.listdir(tmp_path)) == 1


def test_what_a_worker_and_its_children_write_is_progress_and_a_frozen_disk_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "LOOK_SECONDS", 0.01)
    marks: list[tuple[str, bool]] = []
    session: Any = SimpleNamespace(mark=lambda at, phase, microbatch, waits, allow: marks.append((phase, waits)))
    its_hooks: Any = SimpleNamespace(iteration=lambda: 4)
    progress = hooks.ProgressReports(session, its_hooks)
    looks: list[int] = []
    counted = [0, 0]
    """Bytes of each look, and of all, that are not storage's."""

    def moved() -> int:
        counted[1] += counted[0]
        looks.append(children.moved() + counted[1])
        return looks[-1]

    def looked() -> None:
        after = len(looks) + 3
        eventually(lambda: len(looks) > after, "three looks more")

    script = f"read go; dd if=/dev/zero of={tmp_path}/part bs=1M count=1 2>&-; read end"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as child:
        assert child.stdin

        def write() -> str:
            looked()
            counted[0] = 40_000  # a look, as of messages and of looks at many processes
            looked()
            assert marks == [("checkpoint", False)], "nothing is written, as when the disk is frozen"
            counted[0] = 0
            os.write(child.stdin.fileno(), b"go\n")
            eventually(lambda: len(marks) > 1, "a mark for what the child's child has written")
            with progress.waiting("an operation"):
                (tmp_path / "own").write_bytes(bytes(1 << 20))
                looked()
                assert marks[-1] == ("an operation", True), "others are to be blamed while this worker waits"
            return "written"

        assert progress.moving("checkpoint", write, moved)() == "written"
        child.stdin.close()
    assert {mark for mark in marks if not mark[1]} == {("checkpoint", False)}
