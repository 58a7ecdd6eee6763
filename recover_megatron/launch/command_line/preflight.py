"""Checks of a training's flags before any process is started: they take less than a second, also on a login node.

``check`` finds mistakes without importing torch or Megatron: wrong names and values of ``--recover-*``; for Megatron's
scripts also sizes that do not fit the number of workers, numbers that are not multiples of others, and missing
files.  It never refuses flags that Megatron may accept.  The script itself checks all flags
(``megatron_hooks/entry/flags.py``).
"""

from __future__ import annotations

import argparse
import difflib
import glob
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from recover_megatron.arguments import FLAGS, RecoverConfig, problems
from recover_megatron.chaos.spec import BadSpec, parse_spec
from recover_megatron.launch.command_line.forecast import Needs, needs_of
from recover_megatron.launch.command_line.readers import count_gpus, why_not_written
from recover_megatron.launch.command_line.script import EXPERT, EXPERT_TENSOR, INSTANCES, SIZES, Script
from recover_megatron.launch.command_line.spec import HostLimits, LaunchSpec
from recover_megatron.launch.messages import count
from recover_megatron.network import death_notice, system
from recover_megatron.options import Flag, add_options

MICRO, BATCH = "--micro-batch-size", "--global-batch-size"
LAYERS, HEADS, HIDDEN = "--num-layers", "--num-attention-heads", "--hidden-size"
SEQUENCE, POSITIONS, EXPERTS = "--seq-length", "--max-position-embeddings", "--num-experts"
NUMBERS = (
    *(*SIZES.values(), EXPERT, EXPERT_TENSOR, INSTANCES, MICRO, BATCH),
    *(LAYERS, HEADS, HIDDEN, SEQUENCE, POSITIONS, EXPERTS),
)
OTHER_NUMBERS = {
    BATCH: r"batch-size-schedule|decrease-batch|weight-shards|gtp|perform-rl",
    LAYERS: r"pipeline-(?!model-parallel-size)|hybrid|stage|heterogeneous|coder|checkpoint-args",
    HEADS: r"heterogeneous|coder|checkpoint-args",
    HIDDEN: r"heterogeneous|coder|checkpoint-args|kv-channels",
    SEQUENCE: r"coder|checkpoint-args|hybrid-context",
    EXPERTS: r"heterogeneous|checkpoint-args",
}
"""Flag -> pattern of other flags that may make Megatron use a different number than the value of the flag."""
DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
BLENDS = ("--data-args-path", "--per-split-data-args-path")
FILES = (*BLENDS, "--vocab-file", "--merge-file", "--yaml-cfg")
ELSEWHERE = ("--yaml-cfg", "--sft", "--perform-rl-step")
"""Flags with which the data set or other flags come from a source that is not checked here."""
TOKENIZER, TOKENIZER_MODEL = "--tokenizer-type", "--tokenizer-model"
TOKENIZER_FILES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
"""Tokenizers whose model is a file."""


def check(spec: LaunchSpec) -> list[str]:
    """Return the mistakes in the flags of a training; each line states what to change."""
    script, world = spec.script, spec.world_size
    megatrons, recover = script.takes_megatron_flags, "--recover" in script.args
    if {"--help", "-h", "--version"} & set(script.args) or not (megatrons or recover):
        return []
    found = [*_names(script.args), *_values(script, world)]
    if not megatrons:
        return found
    found += [*_layout(spec), *_data(script)]
    if script.is_known:
        found += [*_stray_words(script.args), *_numbers(script, world)]
    return found


DASHES = "-\u2013\u2014"
"""Hyphen, and the dashes with which word processors replace the hyphens at the beginning of a flag."""


def _names(script_args: Sequence[str]) -> list[str]:
    known = [flag.name for flag in FLAGS]
    found = []
    for word in script_args:
        name = word.partition("=")[0]
        meant = "--" + name.lstrip(DASHES).lower().replace("_", "-")
        if name[:1] in DASHES and meant.startswith("--recover") and name not in known:
            longer = [flag for flag in known if flag.startswith(meant)][:2]
            near = [meant] if meant in known else longer or difflib.get_close_matches(meant, known, n=2, cutoff=0.5)
            found.append(f"unknown flag {name}" + (f": did you mean {' or '.join(near)}?" if near else ""))
    return found


def _stray_words(script_args: Sequence[str]) -> list[str]:
    """Return a message for each ``--recover-*`` flag with too many values, which Megatron would reject."""
    flags, found = {flag.name: flag for flag in FLAGS}, []
    for at, word in enumerate(script_args):
        name, equals, _ = word.partition("=")
        if (flag := flags.get(name)) is None or (flag.switch and equals):
            continue
        behind = script_args[at + 1 : at + (2 if flag.switch or equals else 3)]
        if len(behind) == (1 if flag.switch or equals else 2) and not any(each.startswith("-") for each in behind):
            found.append(f"{name} takes {'no' if flag.switch else 'one'} value: remove {behind[-1]}")
    return found


def _values(script: Script, world: int) -> list[str]:
    if not script.readable:  # parse each flag separately, so that all mistakes are reported
        return [mistake for flag in FLAGS if (mistake := _mistake(flag, script.args))]
    config = script.recover
    if config.enabled:
        return [*problems(config), *_faults(config, world), *_metrics(config), *_log_dir(script)]
    if config.inject is not None:
        return ["--recover-inject needs --recover: without it no fault is injected, and the run survives no death"]
    return []


def _mistake(flag: Flag, script_args: Sequence[str]) -> str:
    """Return why the value of ``flag`` cannot be parsed; empty if it can."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser, [flag])
    try:
        parser.parse_known_args(list(script_args))
    except argparse.ArgumentError as error:
        return _in_words(flag, str(error))
    return ""


def _in_words(flag: Flag, error: str) -> str:
    text = error.removeprefix("argument ")
    if "ignored explicit argument" in text:
        return f"{flag.name} takes no value: write only {flag.name}"
    for kind, words in (("int", "a whole number"), ("float", "a number, without a unit")):
        text = text.replace(f"invalid {kind} value: ", f"give {words}, not ")
    return text.replace("expected one argument", f"needs a value, {flag.name} {flag.option.metavar or 'WORD'}")


def _log_dir(script: Script) -> list[str]:
    # Check the flag only, not the environment variable, which the launcher sets itself.
    folders = script.given.get("--recover-log-dir", [])[-1:]
    found = [(folder, why_not_written(Path(folder))) for folder in folders]
    return [f"--recover-log-dir {folder} cannot be written ({why}): choose another" for folder, why in found if why]


def _faults(config: RecoverConfig, world: int) -> list[str]:
    """Return the mistakes in ``--recover-inject``; worker ids from ``world`` on are valid only if the run may grow."""
    try:
        parse_spec(config.inject or "", workers=None if config.max_replicas else world)
    except BadSpec as error:
        return [f"--recover-inject: {reason}" for reason in error.reasons]
    return []


def _metrics(config: RecoverConfig) -> list[str]:
    if not (config.metrics or config.metrics_file) or importlib.util.find_spec("prometheus_client"):
        return []
    flag = "--recover-metrics" if config.metrics else "--recover-metrics-file"
    return [f"{flag} needs the Python package prometheus-client: pip install 'recover-megatron[metrics]'"]


def _layout(spec: LaunchSpec) -> list[str]:
    script, world = spec.script, spec.world_size
    if script.sizes_elsewhere:
        return []
    try:
        sizes = {name: script.number(name, 1) for name in SIZES.values() if name in script.given}
        expert, expert_tensor = script.number(EXPERT, 0), script.number(EXPERT_TENSOR, 0)
    except ValueError:
        return []  # ``_numbers`` reports the invalid number
    replica = prod(sizes.values())
    if replica < 1 or expert < 0 or expert_tensor < 0:
        return []
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    change = "start a multiple of that number (recover-run --nproc-per-node, --nnodes) or change these sizes"
    if world % replica:
        return [f"{world} workers cannot form complete replicas of {replica} workers ({product}): {change}"]
    tensor, pipeline = (sizes.get(SIZES[size], 1) for size in ("tensor", "pipeline"))
    experts = max(1, expert) * (expert_tensor or tensor) * pipeline
    if (expert > 1 or expert_tensor) and world % experts:
        of = f"EP {max(1, expert)}" + (f", {EXPERT_TENSOR} {expert_tensor}" if expert_tensor else "")
        return [f"{world} workers cannot form complete sets of experts, of {experts} workers ({of}): {change}"]
    config, training = script.recover, spec.training
    if training is None:
        return []  # ``_numbers`` or ``_values`` reports the mistake
    replicas = max(1, world // (replica * training.inner_ranks))
    if config.enabled and config.min_replicas > replicas:
        return [
            f"--recover-min-replicas {config.min_replicas}: this run has {replicas} replicas at its launch ({world} "
            f"workers, {world // replicas} per replica): lower it, or start more workers"
        ]
    if config.enabled and 0 < config.max_replicas < replicas:
        return [
            f"--recover-max-replicas {config.max_replicas}: this run has {replicas} replicas at its launch: give at "
            "least as many, or leave it out"
        ]
    return []


def _numbers(script: Script, world: int) -> list[str]:
    """Return mistakes in numbers, which Megatron would report late: after its import, or after it has built the model.

    A number is not checked if another flag may make Megatron use a different number; Megatron repeats all checks.
    """
    alone = ("--save", "--save-interval", "--train-iters", "--train-samples", "--skip-train")
    if script.sizes_elsewhere:
        return []
    given = {name: script.given[name] for name in (*NUMBERS, *alone) if name in script.given}
    found: list[str] = []
    number: dict[str, int] = {}
    for name, words in given.items():
        try:
            if name in NUMBERS:
                (word,) = words
                number[name] = int(word)
        except ValueError:
            found.append(f"{' '.join([name, *words])}: give one whole number")
    tensor, pipeline, context = (number.get(name, 1) for name in SIZES.values())
    expert, replica = number.get(EXPERT, 1), tensor * pipeline * context
    if found or min(tensor, pipeline, context, expert, number.get(MICRO, 1)) < 1 or world % replica:
        return found
    ranks = world // replica
    least = [
        (BATCH, f"{MICRO} {number.get(MICRO)} x {ranks} data-parallel ranks", number.get(MICRO, 0) * ranks),
        (LAYERS, f"{SIZES['pipeline']} {pipeline}", pipeline),
        (HEADS, f"{SIZES['tensor']} {tensor}", tensor),
        (HIDDEN, f"{HEADS} {number.get(HEADS)}", number.get(HEADS, 0)),
        (SEQUENCE, f"2 x {SIZES['context']} {context}", 2 * context if context > 1 else 1),
        (EXPERTS, f"{EXPERT} {expert}", expert),
    ]
    for name, whole, divisor in least:
        others = any(word.startswith("-") and re.search(OTHER_NUMBERS[name], word) for word in script.args)
        if name in number and divisor > 0 and number[name] % divisor and not others:
            found.append(f"{name} {number[name]} is not a multiple of {whole}: change one of them")
    if ranks * context % max(1, number.get(INSTANCES, 1)):
        found.append(f"{INSTANCES} {number[INSTANCES]} does not divide the {ranks * context} data-parallel ranks")
    if SEQUENCE in number and number.get(POSITIONS, number[SEQUENCE]) < number[SEQUENCE]:
        found.append(f"{POSITIONS} {number[POSITIONS]} is below {SEQUENCE} {number[SEQUENCE]}: raise it")
    if "--save" in given and "--save-interval" not in given:
        found.append("--save needs --save-interval N: save a checkpoint every N iterations")
    # Report a missing length only if the sizes are given: then the rest of the command line seems complete.
    if LAYERS in given and MICRO in given and not any(name in given for name in alone[2:]):
        found.append("the length of the training is missing: give --train-iters N, or --train-samples N")
    return found


def _data(script: Script) -> list[str]:
    """Return missing files and data."""
    given = script.given
    needs = Path(script.target).stem.startswith("pretrain_")  # other scripts may have data of their own
    found = _tokenizer(given) + [
        f"{name} {path}: no such file"
        for name in FILES
        for path in given.get(name, [])[-1:]
        if _is_here(path) and not Path(path).is_file()
    ]
    if any(name in given for name in ELSEWHERE) or given.get("--dataloader-type") == ["external"]:
        return found
    if needs and MICRO in given and not any(name in given for name in (*DATA[:2], *BLENDS, "--mock-data")):
        return [
            *found,
            "no training data: give --data-path PREFIX (files PREFIX.bin and PREFIX.idx, made by "
            "scripts/prepare_corpus.py or Megatron's tools/preprocess_data.py), or --mock-data",
        ]
    for name in (*DATA, *BLENDS):
        for prefix in given.get(name, []) if name in DATA else _blend(given.get(name, [])):
            missing = [prefix + suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
            if missing and _is_here(prefix) and not _is_weight(prefix):
                files = " and ".join(missing)
                found.append(f"{name} {prefix}: no {files} here (give the path without .bin or .idx)")
    return found


def _blend(paths: Sequence[str]) -> list[str]:
    """Return the words in the blend file ``paths[-1]``; empty if the file is missing or wrong: Megatron reports it."""
    try:
        text = Path(paths[-1]).read_text(encoding="utf-8") if paths else ""
        if not text.lstrip().startswith("{"):
            return text.split()
        blends = [item.split() if isinstance(item, str) else item for item in json.loads(text).values() if item]
        return [word for blend in blends for word in map(str, blend)]
    except (OSError, ValueError, TypeError):
        return []


def _tokenizer(given: Mapping[str, Sequence[str]]) -> list[str]:
    kind, path = ((given.get(name) or [""])[-1] for name in (TOKENIZER, TOKENIZER_MODEL))
    missing = path and kind in TOKENIZER_FILES and not Path(path).is_file()
    if kind == "HuggingFaceTokenizer":  # a value that is no path is the name of a model
        missing = path.startswith(("/", "./", "../")) and not Path(path).exists()
    return [f"{TOKENIZER_MODEL} {path}: no such file"] if missing and _is_here(path) else []


GPUS = "/dev/nvidia[0-9]*"
"""Pattern of the device files of GPUs: if none exists (in a container), no GPU can be used, even if the driver lists
GPUs.  A container may have GPUs without GPU 0."""


def devices(spec: LaunchSpec) -> list[str]:
    """Return a reason if this node is known to have fewer GPUs than workers and spares; else an empty list."""
    gpus, here = 0 if _on_cpus(spec.script) else count_gpus(spec.environ), spec.processes_here
    if not spec.script.takes_megatron_flags or not 0 < gpus < here:
        return []
    return [
        f"{count(here)} on this node, including spares, but it has {count(gpus, 'GPU', 'GPUs')}: lower "
        "--nproc-per-node or --recover-spares (or train without GPUs: --recover-device cpu)"
    ]


def _on_cpus(script: Script) -> bool:
    device = script.given.get("--recover-device")
    without = device == ["cpu"] or any("+cpu" in one.version for one in importlib.metadata.distributions(name="torch"))
    return without or not glob.glob(GPUS)


def host() -> tuple[list[str], list[str]]:
    """Return reasons why this host or this Python cannot launch any run, and notes about features that it lacks."""
    notes = []
    if why := system.lacking("pidfd_open"):
        notes.append(f"{why}. A thread waits for the end of each process instead")
    if why := death_notice.lacking():
        notes.append(f"{why}. A death is noticed only after the process's memory is freed, 0.1 to 0.6 s per gigabyte")
    if why := system.lacking("memfd_create"):
        notes.append(f"{why}. Rings use TCP even between workers on one host, which is slower")
    return system.refused(), notes


@dataclass(frozen=True)
class Limits:
    """Comparison of this host's limits with the needs of a training.

    ``reasons``: log lines about limits that are too low; ``notes``: lines about limits that may be too low;
    ``counted``: one line with all needs and limits.
    """

    reasons: list[str]
    notes: list[str]
    counted: str


def limits(spec: LaunchSpec) -> Limits | None:
    """Compare this host's limits with the needs of its workers, including spares; None if either is not known."""
    script, here = spec.script, spec.processes_here
    if spec.limits is None or not script.takes_megatron_flags or "--recover" not in script.args:
        return None
    try:
        needs = needs_of(script, spec.world_size, here, spec.environ, cpu=_on_cpus(script))
    except ValueError:
        return None  # ``check`` or Megatron reports the mistake
    return compare(needs, count(here), spec.limits)


def compare(needs: Needs, workers: str, limits: HostLimits) -> Limits:
    """Compare ``needs`` with the limits of a host; ``workers``: for example "2 workers"."""
    files, longest, shared = limits.files, limits.longest, limits.shared
    reasons: list[str] = []
    notes: list[str] = []
    if files < needs.files:
        enough, never = 1 << needs.files.bit_length(), files < needs.least_files
        (reasons if never else notes).append(
            f"ulimit -n {files} {'is' if never else 'may be'} too low: a worker opens up to {needs.files} files and "
            f"connections: run ulimit -n {enough} before recover-run (if that is not permitted: docker --ulimit "
            f"nofile={enough}, LimitNOFILE={enough} of systemd)"
        )
    for limit in limits.tasks:
        if limit.most - limit.used < needs.tasks:
            never = limit.most < needs.least_tasks
            (reasons if never else notes).append(
                f"{limit.name} {limit.most} {'is' if never else 'may be'} too low (in use: {limit.used}): {workers} "
                f"and their helpers need up to {needs.tasks} processes and threads: "
                f"{limit.remedy(limit.used + needs.tasks)}"
            )
    if longest is not None:
        notes.append(
            f"ulimit -f limits every file to {longest} bytes, including logs and parts of checkpoints: run ulimit -f "
            "unlimited before recover-run"
        )
    if shared < needs.shared:
        notes.append(
            f"/dev/shm has {_mib(shared)} left, but the batches of loaders may need {_mib(needs.shared)}: enlarge "
            "it (docker --shm-size, an emptyDir of medium Memory in Kubernetes), or use --num-workers 0"
        )
    few = min((limit.most - limit.used for limit in limits.tasks), default=None)
    return Limits(
        reasons,
        notes,
        f"{needs.files} open files in each worker (of {files}), {needs.tasks} processes and threads "
        f"({'no limit' if few is None else f'of {few}'}), {_mib(needs.shared)} of /dev/shm (of {_mib(shared)})",
    )


def _mib(size: int) -> str:
    return f"{-(-size >> 20)} MiB"


def _is_here(path: str) -> bool:
    """Return whether ``path`` is a path on this host, not a URL."""
    return "://" not in path


def _is_weight(word: str) -> bool:
    """Return whether ``word`` is a number.  In a blend, weights, which are numbers, and data prefixes alternate."""
    try:
        float(word)
    except ValueError:
        return False
    return True
