"""hostdevice.wanted: who decides, and that asking changes nothing."""

import shutil
import subprocess

import pytest

from recover_megatron import hostdevice
from tests.harness.patience import patient

DRIVER = """
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "a made-up failure"; return 0; }
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Put a CUDA driver in place whose cuInit answers as told."""
    if shutil.which("cc") is None:
        pytest.skip("NO C COMPILER: the probe of the CUDA driver is not tested here")

    def install(init):
        source = tmp_path / "driver.c"
        source.write_text(DRIVER.replace("INIT", init))
        library = tmp_path / "libcuda.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=patient(60))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    return install


def test_importing_the_package_imports_no_torch_and_installs_no_finder(fresh_python):
    code = """
import sys
finders = list(sys.meta_path)
import recover_megatron.hostdevice as hostdevice
assert "torch" not in sys.modules and sys.meta_path == finders and not hostdevice.is_active()
"""
    done = fresh_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_drivers_devices_are_counted(driver):
    driver("0")
    assert hostdevice.driver_device_count() == 2


@pytest.mark.parametrize("code", ["100", "34"], ids=["no device", "stub library"])
def test_a_driver_without_a_device_counts_as_none(driver, code):
    driver(code)
    assert hostdevice.driver_device_count() == 0


def test_a_broken_driver_is_an_error_not_a_machine_without_gpu(driver):
    driver("803")
    with pytest.raises(hostdevice.HostDeviceError, match=r"803 a made-up failure.*--recover-device cpu"):
        hostdevice.wanted("auto")
    assert hostdevice.wanted("cpu")


def test_a_driver_that_crashes_is_an_error(driver):
    driver("*(volatile int *)0")
    with pytest.raises(hostdevice.CudaBroken, match="status -11"):
        hostdevice.driver_device_count()


@pytest.mark.parametrize(("count", "auto"), [(0, True), (2, False)])
def test_auto_means_the_host_only_where_there_is_no_device(monkeypatch, count, auto):
    monkeypatch.setattr(hostdevice, "usable_device_count", lambda: count)
    assert hostdevice.wanted("auto") is auto
    assert hostdevice.wanted("cpu") is True


def test_cuda_without_a_device_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(hostdevice, "usable_device_count", lambda: 0)
    with pytest.raises(hostdevice.HostDeviceError, match="--recover-device cpu"):
        hostdevice.wanted("cuda")
    monkeypatch.setattr(hostdevice, "usable_device_count", lambda: 1)
    assert hostdevice.wanted("cuda") is False


def test_an_unknown_device_is_a_programming_error():
    with pytest.raises(ValueError, match="tpu"):
        hostdevice.wanted("tpu")


def test_asking_leaves_the_process_fit_to_fork(in_process):
    in_process("""
        import os
        import torch
        from recover_megatron import hostdevice
        hostdevice.wanted("auto")
        assert not torch.cuda.is_initialized()
        pid = os.fork()
        if pid == 0:  # torch marks the children of a process that asked the CUDA runtime
            os._exit(torch.cuda._is_in_bad_fork())
        assert os.waitpid(pid, 0)[1] == 0
    """)
