"""A worker is what ``python SCRIPT`` would be, with some variables more; and the line that says what is started."""

import json
import signal

import pytest

SHOW = "import json, os, sys; print('ENV', json.dumps(dict(os.environ)))"


def environments(launch):
    found = {}
    for line in launch.out.splitlines():
        if " ENV " in line:
            variables = json.loads(line.partition(" ENV ")[2])
            found[variables["RANK"]] = variables
    return found


def test_workers_get_torchruns_variables_and_ours(bench):
    script = bench.script(SHOW)
    launch = bench.run("--nproc-per-node", 2, "--log-dir", "logs", script, environment={"SOME_OF_MINE": "kept"})
    found = environments(launch)
    assert set(found) == {"0", "1"}
    for rank, variables in found.items():
        expected = {
            "LOCAL_RANK": rank,
            "ROLE_RANK": rank,
            "RECOVER_WORKER_ID": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "default",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "RECOVER_LOG_DIR": str(bench.folder / "logs"),
            "SOME_OF_MINE": "kept",
        }
        assert {name: variables.get(name) for name in expected} == expected
        assert f":{variables['MASTER_PORT']}," in launch.err
        assert variables["TORCHELASTIC_RUN_ID"]
    assert found["0"]["RECOVER_LAUNCH_ID"] == found["1"]["RECOVER_LAUNCH_ID"]


@pytest.mark.slow
def test_omp_threads_are_limited_only_if_the_user_has_not_chosen(bench, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # scripts/test.sh has chosen
    script = bench.script(SHOW)
    chosen = bench.run("--nproc-per-node", 2, script, environment={"OMP_NUM_THREADS": "3"})
    assert environments(chosen)["0"]["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in chosen.err
    limited = bench.run("--nproc-per-node", 2, script)
    assert limited.err.count("OMP_NUM_THREADS") == 1
    alone = bench.run(script)
    assert "OMP_NUM_THREADS" not in environments(alone)["0"]


def test_log_dir_variable_is_only_that_of_the_option(bench):
    launch = bench.run(bench.script(SHOW), environment={"RECOVER_LOG_DIR": "/of/another/launch"})
    assert "RECOVER_LOG_DIR" not in environments(launch)["0"]


@pytest.mark.slow
def test_two_launches_have_different_ids(bench):
    script = bench.script(SHOW)
    ids = {environments(bench.run(script))["0"]["RECOVER_LAUNCH_ID"] for _ in range(2)}
    assert len(ids) == 2


def test_the_first_line_names_what_is_started(bench):
    script = bench.script("")
    first = bench.run("--nproc-per-node", 2, "--log-dir", "logs", script).err.splitlines()[0]
    assert "2 workers" in first
    assert "store 127.0.0.1:" in first
    assert str(bench.folder / "logs") in first


def test_a_worker_leads_a_session_of_its_own_and_reads_nothing(bench):
    script = bench.script("import os, sys; print('LEADS', os.getsid(0) == os.getpid(), repr(sys.stdin.read()))")
    assert "LEADS True ''" in bench.run(script).out


def test_the_script_runs_as_it_does_under_python(bench):
    (bench.folder / "sub").mkdir()
    bench.script("VALUE = 1", "sub/beside.py")
    script = bench.script("import beside, sys; print('AT', __file__, __name__, sys.path[0])", "sub/script.py")
    launch = bench.run(script)
    assert f"AT {bench.folder / 'sub/script.py'} __main__ {bench.folder / 'sub'}" in launch.out


def test_workers_do_not_get_what_recovery_cannot_live_with_and_the_console_says_so(bench):
    script = bench.script(SHOW)
    given = {"TORCH_GLOO_LAZY_INIT": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    launch = bench.run("--nproc-per-node", 2, script, environment=given)
    found = environments(launch)
    assert [("TORCH_GLOO_LAZY_INIT" in its, its["TORCH_DISTRIBUTED_DEBUG"]) for its in found.values()] == [
        (False, "INFO")
    ] * 2
    for line in (
        "TORCH_GLOO_LAZY_INIT=1 of your environment is overruled (not passed on)",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL of your environment is overruled (INFO instead)",
    ):
        assert launch.err.count(line) == 1


def test_a_run_that_gloo_cannot_be_aborted_in_is_refused(bench):
    script = bench.script(SHOW, "pretrain_mine.py")
    launch = bench.run(script, "--recover", "--mock-data", environment={"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}, ends=2)
    assert "GLOO_DEVICE_TRANSPORT=TCP_TLS: only gloo's connections over plain TCP" in launch.err
    assert environments(launch) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "shown"),
    [
        ("sys.exit(5)", 5, ""),
        ("sys.exit('a message')", 1, "a message"),
        ("sys.exit()", 0, ""),
        ("raise ValueError('uncaught')", 1, "ValueError: uncaught"),
        ("os._exit(9)", 9, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("atexit.register(print, 'AT EXIT')", 0, "AT EXIT"),
        ("print('unflushed', end='')", 0, "unflushed"),
        ("threading.Thread(target=lambda: (time.sleep(0.2), print('THREAD DONE'))).start()", 0, "THREAD DONE"),
        ("def f(): assert False, 'deep'\n    f()", 1, "AssertionError: deep"),
    ],
)
def test_a_worker_ends_as_the_script_does_under_python(bench, body, code, shown):
    script = bench.script(
        f"import atexit, os, signal, sys, threading, time\nif __name__ == '__main__':\n    print('RUNS')\n    {body}\n"
    )
    bench.run("--log-dir", "logs", script, ends=code if code >= 0 else 128 - code)
    (worker,) = bench.workers()
    assert (worker["exit_code"] if worker["signal"] is None else -worker["signal"]) == code
    log = bench.log()
    assert shown in log
    assert "RUNS" in log
    assert "recover_megatron" not in log


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_works_in_a_worker(bench, method):
    script = bench.script(
        """
        import multiprocessing, os, sys
        def square(number):
            return number * number
        if __name__ == "__main__":
            with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
                print("SQUARES", pool.map(square, [2, 3]), os.path.basename(sys.modules["__main__"].__file__))
        """
    )
    launch = bench.run(script, method)
    assert "SQUARES [4, 9] script.py" in launch.out


@pytest.mark.slow
def test_a_folder_as_script_runs_its_main(bench):
    (bench.folder / "folder").mkdir()
    (bench.folder / "folder/__main__.py").write_text("print('RAN')")
    launch = bench.run("folder")
    assert "RAN" in launch.out
