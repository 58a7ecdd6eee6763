"""Where the parts of a checkpoint go: to a folder of the attempt until all are written, then to the checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.instep.attempts import Attempt
from recover_megatron.megatron_hooks import checkpoints
from recover_megatron.megatron_hooks.checkpoints import Checkpoints


def test_what_is_written_after_the_tracker_file_belongs_to_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Megatron 0.20 adds the tokenizer's files then, in a folder for which it asks again."""

    def get_checkpoint_name(path: str, iteration: int, release: bool = False, return_base_dir: bool = False) -> str:
        return f"{path}/iter_{iteration:07d}"

    recovery: Any = SimpleNamespace(session=SimpleNamespace(be_in_touch=lambda: None))
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoints, "get_args", lambda: SimpleNamespace(async_save=False))
    groups: Any = SimpleNamespace(recovery=recovery)
    ours = Checkpoints(groups, SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    ours._attempt = Attempt(8, term=1, epoch=3, decision=17)
    name, tracker = ours._name(get_checkpoint_name), ours._written(lambda path: f"{path}/latest")
    folder = Path(name(str(tmp_path), 8))
    folder.mkdir()
    (folder / "part").touch()
    assert tracker(str(tmp_path)) == f"{tmp_path}/latest"
    added = Path(name(str(tmp_path), 8, return_base_dir=True)) / "tokenizer"
    added.mkdir(parents=True)
    ours._publish(recovery, ours._folders)
    final = tmp_path / "iter_0000008"
    assert sorted(path.name for path in final.iterdir()) == ["part", "tokenizer"]
