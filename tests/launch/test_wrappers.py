"""Workers that a program starts (--no-python): numactl, a shell script that binds each worker to its cores."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from recover_megatron.launch.command_line import arguments
from recover_megatron.launch.command_line.script import Script
from tests.harness.waiting import eventually

from .conftest import UNTIL_TOLD, Bench

STAYS = """\
#!/bin/sh
"$@"
exit $?
"""
BECOMES = """\
#!/bin/sh
echo "BOUND $LOCAL_RANK"
exec "$@"
"""
BOTH = """\
#!/bin/sh
'''exec' python "$0"
'''
"""
RUNNER = ("-m", "recover_megatron.megatron_hooks")


def program(bench: Bench, text: str, mode: int = 0o755) -> Path:
    path = bench.folder / "wrap"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("words", "wrapper", "script", "behind"),
    [
        ("env python train.py --recover", ("env", "python"), "train.py", (*RUNNER, "train.py", "--recover")),
        ("env -i python3.12 -u -X dev train.py x", ("env", "-i", "python3.12", "-u", "-X", "dev"), "train.py", None),
        ("env python -m a.b --recover", ("env", "python"), "a.b", (*RUNNER, "-m", "a.b", "--recover")),
        ("env python -m pretrain_gpt_recover --recover", ("env", "python"), "pretrain_gpt_recover", None),
        ("env sh train.sh --recover", (), "env", None),
        ("env python -c pass", (), "env", None),
        ("env python -m", (), "env", None),
        ("env python", (), "env", None),
    ],
)
def test_the_script_behind_python_is_the_one_that_is_checked_and_given_to_the_runner(words, wrapper, script, behind):
    options, reasons = arguments.parse(["--no-python", *words.split()], {})
    assert reasons == []
    assert tuple(Path(word).name for word in options.wrapper) == wrapper
    assert Path(options.script.target).name == script
    path, *rest = options.command
    assert os.path.isabs(path), "it is executed without a look at the PATH"
    assert rest == ([*wrapper[1:], *behind] if behind else words.split()[1:])


def test_flags_of_megatron_are_checked_behind_a_program(refused_here):
    words = ("python", "-u", "pretrain_gpt_recover.py", "--recover", "--tensor-model-parallel-size", "2")
    assert "1 workers cannot form complete replicas of 2" in refused_here("--no-python", "env", *words)
    assert not Script("pretrain_gpt.sh").takes_megatron_flags, "it may give the script that it starts other flags"


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (None, 0, "no such program, here or on the PATH"),
        (BECOMES, 0o644, "it is not executable: chmod +x"),
        ("#!/no/such/sh\n", 0o755, "its interpreter /no/such/sh does not exist"),
        ('exec "$@"\n', 0o755, "it is a text file without an interpreter: make its first line #!/bin/sh"),
    ],
    ids=["missing", "not executable", "no interpreter", "a text"],
)
def test_a_program_that_cannot_be_executed_is_one_clear_line(bench, refused_here, text, mode, reason):
    if text is not None:
        program(bench, text, mode)
    said = refused_here("--no-python", "./wrap", sys.executable, bench.script("pass"))
    assert said.startswith(f"recover-run: --no-python ./wrap: {reason}")
    assert len(said.splitlines()) == 1


def test_what_is_no_script_of_python_is_refused_with_the_option_for_it(bench, refused_here):
    program(bench, BECOMES)
    for words in (["wrap"], [sys.executable], ["env", "A=1"], ["--nproc-per-node", "2", "wrap", "python", "x.py"]):
        assert "write --no-python before it" in refused_here(*words)
    assert "exclude each other" in refused_here("--no-python", "-m", "wrap")
    options, _ = arguments.parse([str(program(bench, BOTH))], {})
    assert arguments.check_files(options) == [], "it is Python, too"


def test_workers_are_what_the_program_makes_of_them(bench):
    program(bench, BECOMES)
    script = bench.script("import sys; print('ARGV', sys.argv[1:])")
    launch = bench.run("--nproc-per-node", 2, "--no-python", "wrap", sys.executable, script, "--no-python", "x")
    for rank in (0, 1):
        assert f"[{rank}] BOUND {rank}" in launch.out
        assert f"[{rank}] ARGV ['--no-python', 'x']" in launch.out


@pytest.mark.parametrize(
    ("victim", "said", "code"),
    [("script", "failed with exit code 137", 137), ("program", "was killed by SIGKILL (signal 9)", 128 + 9)],
)
def test_a_death_behind_a_program_that_stays_is_noticed_and_leaves_nothing(bench, victim, said, code):
    program(bench, STAYS)
    launch = bench.up(2, "--no-python", "./wrap", sys.executable, bench.script(UNTIL_TOLD))
    scripts = dict(re.findall(r"UP (\d) (\d+)", launch.out))
    if victim == "script":
        os.kill(int(scripts["1"]), signal.SIGKILL)
    else:
        bench.kill(1, count=2)
    launch.wait_for(said)
    eventually(lambda: not os.path.exists(f"/proc/{scripts['1']}/exe"), "the end of the script")
    bench.go()
    launch.ends(code)
    assert "[0] DONE 0" in launch.out
