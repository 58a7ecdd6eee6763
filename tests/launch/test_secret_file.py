"""DIR/secret: for the owner of a run, for nobody else, and for recover-status without any setting."""

import json
import os
import signal
import stat

import pytest

from recover_megatron.launch import log_folder
from recover_megatron.launch.log_folder import SecretFile
from tests.harness.waiting import eventually

from .conftest import IN_THE_RUN

SECRET = "0123456789abcdef" * 4


def test_recover_status_reads_a_local_run_by_its_folder_alone(bench):
    launch = bench.start("--nproc-per-node", 2, "--log-dir", "logs", bench.script(IN_THE_RUN))
    launch.wait_for("JOINED", 2)
    secret = bench.folder / "logs" / "secret"
    eventually(secret.exists, "the secret is written")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    seen = bench.status("logs", "--json")
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout)["state"] == "steady"
    text = secret.read_text().strip()
    bench.go()
    assert launch.wait() == 0
    assert not secret.exists()
    for path in (bench.folder / "logs").iterdir():
        assert text not in path.read_text()
    assert json.loads(bench.status("logs", "--json").stdout)["code"] == 0


@pytest.mark.slow
def test_a_secret_of_the_users_is_written_nowhere_and_that_of_a_killed_launch_is_removed(bench):
    script = bench.script(IN_THE_RUN)
    secret = bench.folder / "logs" / "secret"
    launch = bench.start("--log-dir", "logs", script)
    launch.wait_for("JOINED")
    eventually(secret.exists, "the secret is written")
    launch.send(signal.SIGKILL)
    launch.wait()
    assert secret.exists()
    eventually(lambda: not launch.left(), "the end of the killed launch")
    launch = bench.start("--log-dir", "logs", script, environment={"RECOVER_SECRET": SECRET})
    launch.wait_for("JOINED")
    eventually(lambda: not secret.exists(), "that of the killed launch is removed")
    assert bench.status("logs").returncode == 2
    assert bench.status("logs", "--json", RECOVER_SECRET=SECRET).returncode == 0
    bench.go()
    assert launch.wait() == 0


def written(folder):
    said, before = [], os.umask(0)
    file = SecretFile(folder, said.append)
    try:
        file.write(SECRET)
        file.writing.flush()
    finally:
        os.umask(before)
    return said


def test_the_file_is_whole_and_private_whatever_the_umask(tmp_path):
    assert written(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").read_text() == SECRET + "\n"
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "theirs").write_text("untouched")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "secret").symlink_to(tmp_path / "theirs")
    assert written(tmp_path / "logs") == []
    assert (tmp_path / "theirs").read_text() == "untouched"
    assert not (tmp_path / "logs" / "secret").is_symlink()


def test_a_file_of_the_users_stays(tmp_path):
    (tmp_path / "secret").write_text("a key of the user's\n")
    (said,) = written(tmp_path)
    assert "there is a file of that name that no launch has made" in said
    assert (tmp_path / "secret").read_text() == "a key of the user's\n"


def test_where_everybody_could_read_it_no_secret_is_left(tmp_path, monkeypatch):
    def open_to_all(path, flags, mode=0o777, **options):
        return original(path, flags, 0o666, **options)

    original = os.open
    monkeypatch.setattr(log_folder.os, "open", open_to_all)
    (said,) = written(tmp_path)
    assert "does not keep it from others" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["a file", "a folder in its place"])
def test_a_disk_that_does_not_take_it_costs_a_line(tmp_path, place):
    if place == "a file":
        (tmp_path / "logs").write_text("")
    else:
        (tmp_path / "logs" / "secret").mkdir(parents=True)
    (said,) = written(tmp_path / "logs")
    assert "cannot be written" in said
