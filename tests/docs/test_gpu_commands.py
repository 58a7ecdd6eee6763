"""The commands of docs/gpu.md's checklist, as its shell carries them out, are ones that Megatron takes on a Hopper."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.megatron_hooks.tiny import MOCK, MODEL, OURS, SCHEDULE

NODE = (REPOSITORY / "docs" / "gpu.md").read_text(encoding="utf-8").split("**One node of eight**\n\n```\n")[1]
COMMANDS = NODE.split("\n```\n")[0]
RECORDER = '#!{python}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ.get("{variable}")]))\n'
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

HOPPER = f"""
import json, os, sys, types
import torch
torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(name="H100", major=9, minor=0)
torch.cuda.get_device_capability = lambda device=None: (9, 0)
from megatron.training.arguments import parse_args, validate_args
from recover_megatron.arguments import config_from_argv
from recover_megatron.megatron_hooks.entry.flags import arguments_provider
os.environ["WORLD_SIZE"] = "8"
for flags, connections in json.load(sys.stdin):
    os.environ.pop("{VARIABLE}", None)
    os.environ |= {{"{VARIABLE}": connections}} if connections else {{}}
    sys.argv[1:] = flags
    try:
        validate_args(parse_args(arguments_provider(config_from_argv(flags))))
        print("TAKEN", file=sys.stderr)
    except Exception as error:
        print("REFUSED", " ".join(str(error).split()), file=sys.stderr)
"""


def verdicts(commands: str, folder: Path) -> list[tuple[str, str]]:
    """(name of its log folder, what Megatron says to it) of each recover-run; nothing else is found, nor run."""
    recorder = folder / "recover-run"
    recorder.write_text(RECORDER.format(python=sys.executable, variable=VARIABLE))
    recorder.chmod(0o755)
    environment = {"PATH": str(folder), "TRAIN": " ".join([OURS, *MODEL, *SCHEDULE, *MOCK])}
    done = subprocess.run(["/bin/bash", "-c", commands], env=environment, capture_output=True, text=True, check=False)
    said = map(json.loads, done.stdout.splitlines())
    runs = [(argv[argv.index(OURS) + 1 :], connections) for argv, connections in said]
    done = subprocess.run(
        [sys.executable, "-c", HOPPER], input=json.dumps(runs), capture_output=True, text=True, check=True,
        cwd=REPOSITORY, timeout=patient(180), env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    told = re.findall(r"(?m)^((?:TAKEN|REFUSED).*)$", done.stderr)
    return list(zip(re.findall(r"/tmp/(\w+) \$TRAIN", commands), told, strict=True))


@pytest.mark.slow
def test_megatron_takes_every_command_and_those_with_tensor_parallelism_for_the_variable_alone(tmp_path: Path) -> None:
    without = COMMANDS.replace(f"export {VARIABLE}=1", "")
    said = verdicts(f"{COMMANDS}\n{without}", tmp_path)
    as_they_are, without_it = said[: len(said) // 2], said[len(said) // 2 :]
    assert len(as_they_are) >= 8
    assert {verdict for _, verdict in as_they_are} == {"TAKEN"}, as_they_are
    refused = [name for name, verdict in without_it if verdict != "TAKEN"]
    assert refused == [name for name, verdict in without_it if VARIABLE in verdict] == ["g8t", "g8f"]
