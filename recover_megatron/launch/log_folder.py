"""What a launch writes into its log folder, and that no other run does.

    launch.lock         held until the launch ends                                       (folder_lock.py)
    worker-<id>.log     the output of each worker                                        (output.LogFile)
    workers.json        what became of each worker                                       (workers_file.py)
    secret              the secret that the launch made up                               (secret_file.py)

The folder of ``--save`` has such a lock, too.  Without ``--log-dir`` nothing else is written.  The disk neither stops
nor ends the launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from recover_megatron.launch.folder_lock import FolderLock
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.output import LogFile
from recover_megatron.launch.secret_file import SecretFile
from recover_megatron.launch.states import WorkerProcess
from recover_megatron.launch.workers_file import WorkersFile
from recover_megatron.log_writer import PATIENCE_SECONDS, Aside, flush_all


class LogFolder:
    """Made once per launch, in the main thread, where all of it is called."""

    def __init__(
        self, folder: Path | None, lock: FolderLock | None, loop: EventLoop, say: Callable[[str], None],
        save_lock: FolderLock | None = None,
    ) -> None:  # fmt: skip
        """``lock``: of ``folder``; ``say`` tells people of trouble with the disk; ``save_lock``: of --save, held as
        ``lock`` is."""
        self._lock = lock
        self._say = loop.from_thread(say)
        self._locks = [held for held in (lock, save_lock) if held]
        self._logs: list[Aside] = []
        self._workers_file = WorkersFile(folder, self._say) if folder else None
        self._secret_file = SecretFile(folder, self._say) if folder else None
        self._secret_is_ours = False

    def share(self, run_id: str) -> str | None:
        """Make sure that the folders are those of the run ``run_id``; the reason, if another run holds one."""
        return next((reason for lock in self._locks if (reason := lock.share(run_id))), None)

    def open_log(self, path: Path) -> LogFile:
        """The log of one worker."""
        log = LogFile(path, self._say)
        self._logs = [file for file in self._logs if not file.finished] + [log]
        return log

    def write_workers(self, run_id: str, workers: Sequence[WorkerProcess]) -> bool:
        """Bring workers.json up to date.  False: the folder is not this run's yet; call it again."""
        if self._lock is not None and not self._lock.held:
            return False
        if self._workers_file is not None:
            self._workers_file.put(run_id, workers)
        return True

    def keep_secret(self, secret: str) -> None:
        """Leave the secret that this launch has made up to its owner's recover-status, until ``finish``."""
        if self._secret_file is not None:
            self._secret_file.write(secret)
            self._secret_is_ours = True

    def forget_secret(self) -> None:
        """Remove what a killed launch may have left."""
        if self._secret_file is not None:
            self._secret_file.remove()

    def finish(self, code: int | None, reason: str) -> None:
        """All that is left goes to the disk, as long as that takes it; the folder is another run's from now on.

        ``code``, ``reason``: how the launch has ended, for recover-status where no coordinator has led; code None:
        it starts again.
        """
        files = list(self._logs)
        if self._workers_file is not None:
            files.append(self._workers_file.writing)
        if self._secret_file is not None:
            if self._secret_is_ours:
                self._secret_file.remove()
            files.append(self._secret_file.writing)
        for lock in self._locks:
            ending = Aside("", lambda text: None)  # that it fails is of no interest; where it hangs it keeps no other
            ending.submit(partial(lock.end, code, reason), 1)
            files.append(ending)
        flush_all(files)

    def flush_logs(self) -> None:
        """After ``finish``: what has come for the logs since."""
        flush_all(self._logs, PATIENCE_SECONDS)
