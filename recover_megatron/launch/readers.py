"""Readers of the values of recover-run's options: text to value, ValueError with what it must be."""

from __future__ import annotations

import os
from collections.abc import Callable

from recover_megatron.launch import devices


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Reads a whole number; ValueError for anything else."""

    def read(text: str) -> int:
        if text.strip().lstrip("-").isdecimal() and minimum <= int(text) <= (int(text) if maximum is None else maximum):
            return int(text)
        limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"must be a whole number, {limits}")

    return read


def seconds(text: str) -> float:
    """Reads a number of seconds; ValueError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ValueError("must be a number of seconds, 0 or more")
    return value


def lease(text: str) -> str:
    """Reads ``--lease``: auto, off, or a path, which becomes absolute; ValueError for anything else."""
    if text in ("auto", "off"):
        return text
    if not os.path.basename(text):
        raise ValueError("must be auto, off, or the path of a file")
    if not os.path.isdir(os.path.dirname(os.path.abspath(text))):
        raise ValueError("its folder does not exist")
    return os.path.abspath(text)


def witness(text: str) -> str:
    """Reads ``--witness``; ValueError for anything else."""
    if text not in ("auto", "slurm", "kubernetes", "off"):
        raise ValueError("must be auto, slurm, kubernetes or off")
    return text


def log_format(text: str) -> str:
    """Reads ``--log-format``; ValueError for anything else."""
    if text not in ("plain", "iso", "json"):
        raise ValueError("must be plain, iso or json")
    return text


def workers_here(text: str) -> int:
    """Reads ``--nproc-per-node``: a number, or one of torchrun's words; ValueError for anything else."""
    count = devices.processes(text, os.environ)
    try:
        return whole(1)(text) if count is None else count
    except ValueError as error:
        raise ValueError(f"{error}; or gpu, cpu or auto") from None


def nodes(text: str) -> int:
    """Reads ``--nnodes``; of torchrun's MIN:MAX only what means one number."""
    least, colon, most = text.partition(":")
    if not colon:
        return whole(1)(text)
    if whole(1)(least) != whole(1)(most):
        raise ValueError(
            f"a run is launched with all of its nodes: give --nnodes {most}. It goes on when nodes are lost, down to "
            "the script's --recover-min-replicas, and others join it while it runs: recover-run --join"
        )
    return int(least)
