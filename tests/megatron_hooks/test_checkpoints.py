"""Where the parts of a checkpoint go: to a folder of the attempt until all are written, then to the checkpoint.

And what is said where one fails.
"""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.instep.faults import CheckpointFailed, is_full
from recover_megatron.megatron_hooks.checkpoint import checkpoints
from recover_megatron.megatron_hooks.checkpoint.attempts import Attempt
from recover_megatron.megatron_hooks.checkpoint.checkpoints import Checkpoints


def test_what_is_written_after_the_tracker_file_belongs_to_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Megatron 0.20 adds the tokenizer's files then, in a folder for which it asks again."""

    def get_checkpoint_name(path: str, iteration: int, release: bool = False, return_base_dir: bool = False) -> str:
        return f"{path}/iter_{iteration:07d}"

    manager: Any = SimpleNamespace(wait_in_touch=lambda: None)
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoints, "get_args", lambda: SimpleNamespace(async_save=False))
    unused: Any = None
    ours = Checkpoints(unused, unused, lambda: None, lambda: manager)
    ours._attempt = Attempt(8, term=1, epoch=3, decision=17)
    name, tracker = ours._name(get_checkpoint_name), ours._written(lambda path: f"{path}/latest")
    folder = Path(name(str(tmp_path), 8))
    folder.mkdir()
    (folder / "part").touch()
    assert tracker(str(tmp_path)) == f"{tmp_path}/latest"
    added = Path(name(str(tmp_path), 8, return_base_dir=True)) / "tokenizer"
    added.mkdir(parents=True)
    ours._publish(manager, ours._folders)
    final = tmp_path / "iter_0000008"
    assert sorted(path.name for path in final.iterdir()) == ["part", "tokenizer"]


@pytest.mark.parametrize(
    ("error", "to_folder"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/save/attempt_4"), True),
        (RuntimeError("RuntimeError: File too large (in /save/attempt_4/__2_0.distcp)"), True),
        (RuntimeError("[enforce fail at inline_container.cc:664] . PytorchStreamWriter failed writing file"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/segment"), False),
        (PermissionError(errno.EACCES, "Permission denied", "/elsewhere/of-a-hook"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), False),
        (ValueError("a hook's"), False),
    ],
    ids=repr,
)
def test_that_a_folder_cannot_be_written_is_said_where_a_write_to_it_has_failed(
    error: Exception, to_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "recover_megatron.instep.faults.os.statvfs", lambda _: SimpleNamespace(f_bavail=9, f_frsize=1 << 20)
    )
    monkeypatch.setattr(checkpoints, "get_args", lambda: SimpleNamespace(save="/save"))
    groups: Any = None
    records: Any = SimpleNamespace(last_checkpoint=lambda: "none")
    with pytest.raises(CheckpointFailed) as failed:
        Checkpoints(groups, records, lambda: None, lambda: None)._explain(error, "the checkpoint of iteration 4")
    words = "cannot be written to /save" if to_folder else "has failed"
    told = "No space left on device" if is_full(error, "/save") else f"{type(error).__name__}: {error}"
    assert str(failed.value) == f"the checkpoint of iteration 4 {words}: {told}. Last complete checkpoint: none"
    assert failed.value.to_folder is to_folder
