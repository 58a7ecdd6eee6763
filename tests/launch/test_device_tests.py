"""A device is tested before a worker is started on it in place of another, and left out if it fails."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.launch import device_test
from recover_megatron.launch.command_line.arguments import parse
from recover_megatron.launch.device_test import DEFAULT, command_of
from tests.harness.patience import patient
from tests.launch.test_newcomers import LONGER, SCRIPT, awaits, training

PASSES = f"{sys.executable} -c pass"
FAILS = f"""{sys.executable} -c 'print("no spare memory rows"); raise SystemExit(1)'"""
HANGS = "sleep 1000"


# -- which ------------------------------------------------------------------------------------------------------------


def test_only_workers_on_cuda_devices_have_a_test_unless_one_is_given(tmp_path: Path) -> None:
    driver, none = (str(tmp_path),), (str(tmp_path / "none"),)
    assert command_of((), "cpu", driver) == ()
    assert command_of((), "auto", none) == ()
    assert command_of((), "auto", driver) == DEFAULT
    assert command_of((), "cuda", none) == DEFAULT
    assert command_of(("dcgmi", "diag"), "cpu", none) == ("dcgmi", "diag")


# -- the test itself --------------------------------------------------------------------------------------------------


def test_a_device_that_computes_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_test.computes(torch.device("cpu"), 4096, 64) == ""


def test_a_device_that_gets_one_element_of_one_product_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    multiply = torch.Tensor.__matmul__

    def sometimes_wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        products.append(multiply(left, right))
        if len(products) == device_test.ROUNDS + 1:
            products[-1][3, 5] += 1
        return products[-1]

    monkeypatch.setattr(torch.Tensor, "__matmul__", sometimes_wrong)
    assert "the product" in device_test.computes(torch.device("cpu"), 4096, 64)


def test_memory_that_loses_a_byte_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.full

    def loses(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = full(*args, **kwargs)
        memory[77] = 0
        return memory

    monkeypatch.setattr(torch, "full", loses)
    assert "do not keep" in device_test.computes(torch.device("cpu"), 4096, 64)


class Nvml:
    """In place of pynvml: what it says of one device; None: it does not know."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 1, 0, 230

    class NVMLError(Exception):
        """Its only type of error."""

    def __init__(self, ecc: int | None, rows: tuple[int, ...] | None, action: int | None) -> None:
        self._ecc, self._rows, self._action = ecc, rows, action

    def nvmlInit(self) -> None:
        """It is there."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1"
        return uuid

    def _known(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return self._known(self._ecc)

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, ...]:
        return self._known(self._rows)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        assert fields == [230]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self._known(self._action)))]


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (Nvml(0, (3, 1, 0, 0), 0), ""),
        (Nvml(None, None, None), ""),
        (Nvml(2, (0, 0, 0, 0), 0), "2 uncorrectable ECC errors"),
        (Nvml(0, (0, 1, 1, 0), 0), "need a reset"),
        (Nvml(0, (0, 9, 0, 1), 0), "no spare"),
        (Nvml(None, None, 1), "needs a reset"),
        (Nvml(0, (0, 0, 0, 0), 9), "recovery action 9"),
    ],
    ids=["well", "knows nothing", "ecc", "rows pending", "rows failed", "xid", "unknown action"],
)
def test_what_nvml_counts_against_a_device_is_told(nvml: Any, said: str) -> None:
    told = device_test.nvml_error(nvml, "GPU-1")
    assert said in told
    assert bool(told) == bool(said)


def test_without_a_cuda_device_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_test.examine(1) == "this host has only 1 CUDA devices"


def test_a_test_that_could_not_run_is_refused_at_start() -> None:
    common = ["--nproc-per-node", "2"]
    script = [__file__, "--recover"]
    _, reasons = parse([*common, "--max-restarts", "1", "--device-test", "no-such-program -x", *script])
    assert any("--device-test no-such-program -x: no such program" in reason for reason in reasons)
    _, reasons = parse([*common, "--device-test", "sh -c true", *script])
    assert any("add --max-restarts" in reason for reason in reasons)
    options, reasons = parse([*common, "--max-restarts", "1", "--device-test", "sh -c 'exit 0'", *script])
    assert reasons == []
    assert options.device_test_command[1:] == ("-c", "exit 0")
    assert options.device_test_command[0].endswith("/sh")


# -- real processes ---------------------------------------------------------------------------------------------------

slow = pytest.mark.slow


@slow
def test_a_worker_is_started_on_a_device_that_has_passed(bench) -> None:
    tested = bench.folder / "tested"
    command = f"""sh -c 'kill -USR1 $$; echo "$LOCAL_RANK" > {tested}'"""  # as SLURM may tell it before a time limit
    launch = training(bench, 3, 1, "--device-test", command, *SCRIPT, environment=awaits(1))
    bench.kill(1, 3)
    launch.ends()
    assert "worker 3 is started in its place if its device passes a test" in launch.err
    assert tested.read_text() == "1\n"
    record = bench.workers()[3]
    assert (record["replaces"], record["local_rank"], record["state"], record["note"]) == (1, 1, "finished", "")


@slow
@pytest.mark.parametrize(
    ("command", "timeout", "why"),
    [(FAILS, patient(60), "no spare memory rows"), (HANGS, 0.2, "did not end within 0.2 s")],
    ids=["fails", "hangs"],
)
def test_a_device_that_fails_its_test_is_left_out_and_named(bench, command: str, timeout: float, why: str) -> None:
    launch = training(bench, 3, 2, "--device-test", command, "--device-test-timeout", timeout, *LONGER)
    bench.kill(1, 3)
    launch.wait_for("worker 3 is not started: the device of local rank 1 on")
    bench.go()
    launch.ends()
    assert why in launch.err
    record = bench.workers()[3]
    assert (record["pid"], record["state"], record["replaces"]) == (None, "killed", 1)
    assert record["note"].startswith("not started: the device of local rank 1 failed its test")
    assert why in record["note"]
    assert len(bench.workers()) == 4, "it is not tried again"


@slow
def test_a_launch_that_ends_during_a_test_leaves_nothing(bench) -> None:
    launch = training(bench, 2, 1, "--device-test", HANGS, *SCRIPT)  # it does not end by itself
    bench.kill(1, 2)
    launch.wait_for("if its device passes a test")
    launch.send(signal.SIGTERM)
    launch.ends(128 + signal.SIGTERM)
