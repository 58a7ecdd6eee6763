"""The launcher hosts the control plane: its secret, its verdict, and no trace of it for scripts that do not use it."""

import json

import pytest

USES_IT = """
    import os, signal, sys
    from recover_megatron.membership.worker import connect

    session = connect()
    plan = session.join({"hello": os.environ["RANK"]})
    print("MEMBERS", sorted(plan.members), flush=True)
    session.agree(1)
    if os.environ["RANK"] in sys.argv[1:]:
        os.kill(os.getpid(), signal.SIGKILL)
    session.leave()
    """


def test_a_run_whose_last_members_left_in_order_ends_with_0_whoever_died_before(bench):
    code, launch = bench.run("--nproc-per-node", 3, "--log-dir", "logs", bench.script(USES_IT), "1")
    assert launch.out.count("MEMBERS [0, 1, 2]") == 3
    assert "worker 1" in launch.err
    assert "killed by SIGKILL" in launch.err
    assert code == 0
    events = [json.loads(line) for line in (bench.folder / "logs" / "events-0.jsonl").read_text().splitlines()]
    assert [event["code"] for event in events if event["event"] == "stop"] == [0]


def test_without_a_session_a_failed_worker_gives_the_exit_code(bench):
    code, _ = bench.run("--nproc-per-node", 2, bench.script("import os, sys; sys.exit(7 * int(os.environ['RANK']))"))
    assert code == 7


@pytest.mark.parametrize("variable", ["RECOVER_SECRET", "RECOVER_SECRET_FILE"])
def test_a_secret_that_cannot_be_used_is_refused_before_any_worker_starts(bench, variable):
    secret = bench.folder / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o644)
    value = "short" if variable == "RECOVER_SECRET" else str(secret)
    code, launch = bench.run(bench.script("print('STARTED')"), environment={variable: value})
    assert code == 2
    assert "secret" in launch.err
    assert "STARTED" not in launch.out
    assert "Traceback" not in launch.err
    assert "short" not in launch.err.replace("shorter", "")


def test_the_secret_is_in_no_command_line_and_in_no_log(bench):
    script = bench.script(
        """
        import os, pathlib, sys
        secret = os.environ["RECOVER_SECRET"].encode()
        lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
        print("SEEN", sum(secret in line for line in lines))
        pathlib.Path(sys.argv[1]).write_bytes(secret)
        """
    )
    code, launch = bench.run("--log-dir", "logs", script, "kept")
    assert code == 0
    assert "SEEN 0" in launch.out
    secret = (bench.folder / "kept").read_bytes()
    assert len(secret) == 64
    assert not [path for path in (bench.folder / "logs").iterdir() if secret in path.read_bytes()]
