"""workers.json: merged between launchers, replaced whole, without the entries of earlier runs."""

import json
import threading

import pytest

from recover_megatron.launch.log_folder import WorkersFile
from recover_megatron.launch.states import WorkerProcess, WorkerState


def worker(worker_id, state=WorkerState.RUNNING):
    return WorkerProcess(worker_id, 100 + worker_id, "host", state, 0, worker_id)


def write_workers(folder, run_id, workers):
    file = WorkersFile(folder, pytest.fail)
    file.put(run_id, workers)
    assert file.writing.flush()
    file.writing.close()


def ids(folder):
    return [entry["worker_id"] for entry in json.loads((folder / "workers.json").read_text())]


def test_entries_have_exactly_the_documented_fields(tmp_path):
    write_workers(tmp_path, "run", [worker(0)])
    assert json.loads((tmp_path / "workers.json").read_text()) == [
        {
            "worker_id": 0,
            "pid": 100,
            "host": "host",
            "state": "running",
            "node_rank": 0,
            "local_rank": 0,
            "exit_code": None,
            "signal": None,
            "started": None,
            "ended": None,
            "log": None,
            "rank": None,
            "replaces": None,
            "note": "",
        }
    ]


def test_launchers_of_one_run_merge_and_sort(tmp_path):
    write_workers(tmp_path, "run", [worker(2), worker(3)])
    write_workers(tmp_path, "run", [worker(1), worker(0)])
    assert ids(tmp_path) == [0, 1, 2, 3]


def test_entries_of_an_earlier_run_are_dropped(tmp_path):
    write_workers(tmp_path, "earlier", [worker(0), worker(1), worker(2)])
    write_workers(tmp_path, "later", [worker(0)])
    assert ids(tmp_path) == [0]


def test_a_damaged_file_is_replaced(tmp_path):
    write_workers(tmp_path, "run", [worker(0)])
    (tmp_path / "workers.json").write_text('[{"worker_id": ')
    write_workers(tmp_path, "run", [worker(1)])
    assert ids(tmp_path) == [1]


def test_a_reader_never_sees_a_partial_file_and_concurrent_writers_lose_nothing(tmp_path):
    write_workers(tmp_path, "run", [worker(0)])

    def write(first):
        for _ in range(50):
            write_workers(tmp_path, "run", [worker(first + number) for number in range(20)])

    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 20, 40)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert ids(tmp_path)  # json.loads raises on a partial file
    assert ids(tmp_path) == list(range(60))
