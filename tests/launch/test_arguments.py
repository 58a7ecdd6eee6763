"""The command line: what is accepted, and that every problem is said at once, before a process is started."""

import argparse
import socket
import sys
from dataclasses import replace

import pytest

from recover_megatron.launch import command
from recover_megatron.launch.command_line import arguments
from recover_megatron.launch.command_line.script import Script
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.nodes import store

from .conftest import UNTIL_TOLD


def test_everything_after_script_belongs_to_the_script(bench):
    script = bench.script("import sys; print(sys.argv)")
    launch = bench.run(script, "--nproc-per-node", "9", "--join", "--help", "--unknown")
    assert f"{[script, '--nproc-per-node', '9', '--join', '--help', '--unknown']}" in launch.out


@pytest.mark.parametrize("words", [["--nproc-per-node", "2"], ["--nproc_per_node", "2"], ["--nproc_per_node=2"]])
def test_dashes_and_underscores_are_the_same(words):
    options, reasons = arguments.parse([*words, "train.py"])
    assert (options.nproc_per_node, options.script.target, reasons) == (2, "train.py", [])


def test_short_module_option(bench):
    bench.script("import sys; print(__name__, sys.argv[1:])", "some_module.py")
    launch = bench.run("-m", "some_module", "--flag")
    assert "[0] __main__ ['--flag']" in launch.out


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("--nproc-per-nod", "--nproc-per-node"),
        ("--nproc", "--nproc-per-node"),
        ("--log_dirs", "--log-dir"),
        ("--master-prot", "--master-port"),
        ("--standalone", "leave it out"),
        ("--role", "of torchrun is not an option of recover-run: leave it out"),
        ("--monitor-interval", "of torchrun is not an option of recover-run: leave it out"),
        ("-t", "use --log-dir"),
        ("--warm", "options of the script go after SCRIPT"),
        ("--recover", "is an option of the script: write it after SCRIPT"),
        ("--recover-hang-timeout", "is an option of the script: write it after SCRIPT"),
    ],
)
def test_an_unknown_option_names_the_nearest(refused_here, option, nearest):
    said = refused_here(option, "2", "train.py")
    assert option in said
    assert nearest in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nproc-per-node", "0", "S"], "--nproc-per-node '0'"),
        (["--nproc-per-node", "-1", "S"], "--nproc-per-node '-1'"),
        (["--nproc-per-node", "many", "S"], "whole number"),
        (["--master-port", "70000", "S"], "from 0 to 65535"),
        (["--grace-seconds", "soon", "S"], "number of seconds"),
        (["--grace-seconds", "nan", "S"], "number of seconds"),
        (["--nnodes", "2", "--node-rank", "2", "S"], "--node-rank 2 is not below --nnodes 2"),
        (["--nnodes", "2", "--lease", "/tmp", "S"], "--lease '/tmp': must be auto, off, or the path of a file"),
        (["--join=yes", "S"], "takes no value"),
        (["--log-dir"], "needs a value"),
        ([], "no SCRIPT"),
        ([""], "no SCRIPT"),
        (["-m", "", "--recover"], "no SCRIPT"),
        (["missing.py"], "missing.py does not exist"),
        (["-m", "no_such_module_here"], "module no_such_module_here is not found"),
        (["-m", "logging"], "module logging is a package without a __main__.py"),
        (["-m", "json.tool.more"], "module json.tool.more is not found"),
        (["-m", "script.py"], "module script.py is not found (write -m script)"),
        (["python", "S"], "SCRIPT is python: leave it out"),
        (["./pretrain_gpt_recover.py"], "to run the installed script, give its bare name, pretrain_gpt_recover.py"),
        (
            ["-m", "pretrain_gpt_recover", "--save", "S", "--save-interval", "1"],
            f"is not a folder) on host {socket.gethostname()}: no checkpoint could be",
        ),
        (["--log-dir", "S/logs", "S"], "cannot be written"),
        (["--master-addr", "no-such-host.invalid", "S"], "cannot be resolved"),
        (["--master-addr", "192.0.2.1", "S"], "not an address of this host"),
        (["--nnodes", "2", "--master-addr", "192.0.2.1", "S"], "not an address of this host"),
    ],
)
def test_a_bad_command_line_is_one_clear_line(bench, refused_here, argv, words):
    script = bench.script("print('ran')")
    said = refused_here(*[word.replace("S", script) if word.startswith("S") else word for word in argv])
    assert words in said
    assert len(said.splitlines()) == 1


def test_all_problems_are_said_together(bench):
    """By the command itself, and nothing else is."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = ["--nproc-per-node", "0", "--node-rank", "3", "--log-dir", "/proc/none", "--master-port", port]
        launch = bench.run(*argv, "missing.py", ends=2)
    said = launch.err
    assert "Traceback" not in said
    assert "starting" not in said
    assert launch.out == ""
    for words in ("--nproc-per-node", "--node-rank 3", "/proc/none", f"port {port}", "missing.py"):
        assert words in said


def test_all_options_of_torchruns_are_told(refused_here):
    said = refused_here("--standalone", "--rdzv_backend=c10d", "--rdzv-endpoint", "a:1", "train.py", "--role", "x")
    assert [word for word in ("--standalone", "--rdzv_backend", "--rdzv-endpoint", "--role") if word not in said] == [
        "--role"
    ]


def test_check_leaves_nothing_behind_and_sees_who_uses_the_folders(bench, monkeypatch, capsys):
    words = ("--log-dir", "logs", bench.script(UNTIL_TOLD), "--recover", "--save", "checkpoints")
    monkeypatch.chdir(bench.folder)
    assert command.run(["--check", *words]) == 0
    assert [path.name for path in bench.folder.iterdir()] == ["script.py"]
    launch = bench.start(*words)
    launch.wait_for("UP")
    capsys.readouterr()
    for nodes in ([], ["--nnodes", "2"]):
        assert command.run(["--check", *nodes, *words]) == 2
        said = capsys.readouterr().err
        assert said.count(f"is in use by another run (recover-run with pid {launch.pid}") == 2
    bench.go()
    launch.ends()
    assert command.run(["--check", *words]) == 0


def test_check_needs_no_address_of_the_run_to_join(bench, monkeypatch):
    monkeypatch.chdir(bench.folder)
    join = ["--join", "--recover-coordinator", "none.invalid:1", "--master-addr", "none.invalid", "--master-port", "9"]
    assert command.run(["--check", *join, "--world-size", "4", bench.script("pass"), "--recover"]) == 0


def test_check_of_a_batch_script_is_told_the_nodes_that_srun_will_have():
    nodes = arguments.parse(["--check", "--slurm", "--nnodes", "4", "--nproc-per-node", "8", __file__], {})
    assert (nodes[0].nnodes, nodes[1]) == (4, [])
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    options, reasons = arguments.parse(["--check", "--slurm", __file__], job)
    assert (options.nnodes, options.nproc_per_node, reasons) == (2, 4, [])
    assert "this process is not a task of a SLURM step" in arguments.parse(["--slurm", __file__], job)[1][0]


def test_a_port_in_use_is_refused_with_the_way_out(bench, refused_here):
    script = bench.script("print('ran')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused_here("--master-port", port, script)
    assert f"port {port} on host 127.0.0.1 is in use by another process" in said
    assert "choose another --master-port or leave it out to use a free port" in said


def test_the_port_is_held_from_the_check_on():
    reserved, reason = store.open_listener("127.0.0.1", 0, 1)
    assert reason is None
    with reserved:
        second, reason = store.open_listener("127.0.0.1", reserved.getsockname()[1], 1)
    assert second is None
    assert "in use" in reason


def test_a_module_is_looked_for_without_importing_it(bench, monkeypatch):
    package = bench.folder / "somepackage"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "train.py").write_text("")
    (bench.folder / "examples" / "t5").mkdir(parents=True)  # packages without an __init__.py
    (bench.folder / "examples" / "t5" / "train.py").write_text("")
    monkeypatch.chdir(bench.folder)
    names = {"somepackage.train": True, "somepackage.tran": False, "json.tool": True}
    for name, found in {**names, "examples.t5.train": True, "examples.t5.tran": False}.items():
        options, _ = arguments.parse(["-m", name])
        assert (arguments.check_files(options) == []) is found
    assert "somepackage" not in sys.modules


@pytest.mark.parametrize(
    ("words", "runner"),
    [
        (["train.py", "--recover"], True),
        (["a folder", "--recover"], True),
        (["train.v2", "--recover"], True),
        (["-m", "my.train", "--recover"], True),
        (["train.py", "--recover-device", "cpu"], True),
        (["train.py"], False),
        (["--elastic", "train.py", "--recover"], False),
        (["packed.pyz", "--recover"], False),
        (["/somewhere/pretrain_gpt_recover.py", "--recover"], False),
        (["-m", "pretrain_gpt_recover", "--recover"], False),
        (["-m", "recover_megatron.hostdevice", "train.py", "--recover"], False),
    ],
)
def test_a_script_with_recover_is_given_to_the_runner_unless_it_is_ours(words, runner):
    options, _ = arguments.parse(words)
    before, rest = ["-m", "recover_megatron.megatron_hooks"], [word for word in words if word != "--elastic"]
    assert options.command == (sys.executable, *before * runner, *rest)


def test_help_lists_every_option(bench):
    launch = bench.run("--help")
    assert [flag.name for flag in arguments.FLAGS if flag.name not in launch.out] == []


JOIN = "--join --recover-coordinator a:1,b:2 --world-size 4 --master-addr 127.0.0.1 --master-port 9".split()


def test_a_launcher_that_joins_knows_the_run_by_its_options_or_by_the_scripts(monkeypatch):
    options, reasons = arguments.parse([*JOIN, "train.py", "--recover"])
    assert reasons == []
    assert (options.coordinators, options.joined_world_size) == ((("a", 1), ("b", 2)), 4)
    without = ["--join", *JOIN[3:], "train.py", "--recover"]
    assert arguments.parse([*without, "--recover-coordinator", "c:3"])[0].coordinators == (("c", 3),)
    monkeypatch.delenv("RECOVER_COORDINATOR", raising=False)
    assert "--join needs --recover-coordinator" in arguments.parse(without)[1][0]


@pytest.mark.parametrize(
    ("options", "script_args", "reason"),
    [
        (["--max-restarts", 2], [], "--max-restarts: workers can be replaced only in a run with --recover"),
        (["--max-restarts", -1], ["--recover"], "--max-restarts '-1': must be a whole number, at least 0"),
        (["--world-size", 2], ["--recover"], "--world-size is for --join"),
        (["--recover-coordinator", "a:1"], ["--recover"], "--recover-coordinator is for --join"),
        ([*JOIN, "--nnodes", 2], ["--recover"], "--join: leave out --nnodes and --node-rank"),
        (JOIN, [], "--join: only a run with --recover or --elastic can be joined"),
        ([*JOIN, "--recover-coordinator", "a"], ["--recover"], "'a' is not HOST:PORT"),
        ([*JOIN, "--master-port", 0], ["--recover"], "--join needs the run's store: --master-addr A and --master-port"),
        (["--join", "--recover-coordinator", "a:1", "--master-port", 9], ["--recover"], "--join needs --world-size W"),
        (JOIN, ["--recover"], "--join needs the secret of the run: set RECOVER_SECRET"),
    ],
)
def test_what_cannot_be_started_while_a_run_goes_on_is_refused(
    bench, refused_here, monkeypatch, options, script_args, reason
):
    for name in ("RECOVER_SECRET", "RECOVER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    if "secret" not in reason:
        monkeypatch.setenv("RECOVER_SECRET", "a secret that is long enough")
    said = refused_here(*options, bench.script("pass"), *script_args)
    assert f"recover-run: {reason}" in said or f": {reason}" in said, said


PETS = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "29400"}


def test_the_variables_of_torchrun_are_the_defaults_of_the_options():
    environ = {**PETS, "PET_NPROC_PER_NODE": "4", "RANK": "1", "WORLD_SIZE": "2"}
    options, reasons = arguments.parse(["--nproc-per-node", "3", __file__], environ)
    assert reasons == []
    shape = (options.nnodes, options.node_rank, options.master_addr, options.master_port, options.nproc_per_node)
    assert shape == (2, 1, "pod-0", 29400, 3)
    assert options.taken == PETS
    alone, reasons = arguments.parse(["--nnodes", "1", "--node-rank", "0", __file__], environ)
    assert (alone.nnodes, alone.node_rank, alone.nproc_per_node, reasons) == (1, 0, 4, [])


def test_command_line_variables_and_a_spec_made_by_hand_are_the_same_launch():
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "pod-0", "--master-port", "29400"]
    script = ["pretrain_gpt_recover.py", "--recover", "--recover-spares", "2", "--save", "out"]
    by_hand = LaunchSpec(
        nnodes=2, node_rank=1, master_addr="pod-0", master_port=29400, host=socket.gethostname(),
        script=Script.read(script[0], script[1:], {}),
    )  # fmt: skip
    assert arguments.parse([*words, *script], {}) == arguments.parse(script, PETS) == (by_hand, [])
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "pod-[0-1]"}
    of_slurm = arguments.parse(["--slurm", "--master-addr", "pod-0", "--master-port", "29400", *script], step)
    assert of_slurm == (replace(by_hand, slurm=True), [])


def test_the_command_line_is_parsed_once(bench, monkeypatch):
    """And the script's part twice: our flags with their types, and all flags as words."""
    parsed, parse = [], argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_known_args", lambda self, argv: parsed.append(list(argv)) or parse(self, argv)
    )
    words = ["--recover", "--mock-data", "--recover-spares", "1", "--tensor-model-parallel-size", "2"]
    given = ["--check", "--nnodes", "2", "--nproc-per-node", "2", "pretrain_gpt_recover.py", *words]
    assert command.run(given) == 0
    assert parsed == [given, words, words]


def test_a_launch_does_not_show_the_secret_of_its_environment():
    assert "a secret" not in repr(arguments.parse([__file__], {"RECOVER_SECRET": "a secret"}))


def test_a_launch_that_joins_takes_nothing_of_the_shape_but_its_own_workers():
    options, _ = arguments.parse(["--join", __file__], {**PETS, "PET_NPROC_PER_NODE": "4"})
    assert (options.nnodes, options.node_rank, options.nproc_per_node) == (1, 0, 4)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES '1:4': --nnodes MIN:MAX is not supported"),
        ({"PET_NNODES": "2"}, "PET_NNODES is 2, but the rank of this node is unknown: give --node-rank R"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "with --nnodes 2 --node-rank 1 --master-addr A --master-port P"),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
            "--nnodes 8 --node-rank 0 --master-addr pod-0 --master-port 23456",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK 0 and OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "or give --nnodes 1 for a separate launch"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "SLURM_STEP_ID": "0"}, "start recover-run there with --slurm"),
    ],
)
def test_one_of_several_launches_that_does_not_say_so_is_refused(refused_here, monkeypatch, environ, reason):
    """In pods and under mpirun each would train alone, and save where the others do."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert reason in refused_here(__file__)


@pytest.mark.parametrize("environ", [{"WORLD_SIZE": "8"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"PMI_SIZE": "1"}])
def test_who_is_one_of_one_may_be_launched_alone(environ):
    assert arguments.parse([__file__], environ)[1] == []
    assert arguments.parse(["--nnodes", "1", __file__], {"RANK": "1", "WORLD_SIZE": "2"})[1] == []
