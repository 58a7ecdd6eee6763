"""hostdevice.wanted: who decides; hostdevice.activate: what differs afterwards, and only that."""

import shutil
import subprocess
from pathlib import Path

import pytest

from recover_megatron import hostdevice
from tests.harness.patience import patient

HERE = Path(__file__).parent
DOCUMENT = HERE.parent.parent / "docs" / "reference" / "hostdevice.md"


def test_after_activation_exactly_the_tables_names_differ(in_process):
    in_process(
        """
        from snapshot import changed, snapshot
        from recover_megatron import hostdevice
        from recover_megatron.hostdevice import replacements
        from recover_megatron.hostdevice import apex_stub
        before, names = snapshot(), {entry.path for entry in replacements.table()}
        hostdevice.activate()
        differ = changed(before, snapshot())
        assert hostdevice.is_active()
        assert differ == names, (differ - names, names - differ)
        """,
        path=[HERE],
    )


def test_not_activated_every_name_of_torch_is_as_it_was(in_process):
    in_process(
        """
        from snapshot import changed, snapshot
        before = snapshot()
        from recover_megatron import hostdevice
        from recover_megatron.hostdevice import replacements
        from recover_megatron.hostdevice import apex_stub
        hostdevice.wanted("auto")
        replacements.table()
        assert changed(before, snapshot()) == set()
        """,
        path=[HERE],
    )


def test_where_cuda_exists_auto_replaces_nothing(in_process):
    if hostdevice.usable_device_count() == 0:
        pytest.skip("NO CUDA DEVICE HERE: that the host device is inert beside one is not tested")
    in_process(
        """
        import sys
        from snapshot import changed, snapshot
        before, finders = snapshot(), list(sys.meta_path)
        from recover_megatron import hostdevice
        if hostdevice.wanted("auto"):
            hostdevice.activate()
        assert not hostdevice.is_active()
        assert changed(before, snapshot()) == set() and sys.meta_path == finders
        import torch
        assert torch.zeros(1, device="cuda").device.type == "cuda"
        """,
        path=[HERE],
    )


def test_activation_says_so_once_and_only_in_rank_0(in_process):
    code = "from recover_megatron import hostdevice; hostdevice.activate(); hostdevice.activate()"
    for text in (in_process(code), in_process(code, RANK="0")):
        assert text.startswith("[hostdevice] ")
        assert len(text.splitlines()) == 1
    assert in_process(code, RANK="1") == ""


def test_activation_after_megatron_is_refused(in_process):
    in_process("""
        import sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        from recover_megatron import hostdevice
        try:
            hostdevice.activate()
        except hostdevice.HostDeviceError as error:
            assert "before Megatron is imported" in str(error) and "megatron.core" in str(error)
        else:
            raise AssertionError("not refused")
        import torch
        assert not hostdevice.is_active() and torch.zeros.__module__ != "recover_megatron.hostdevice.replacements"
    """)


@pytest.mark.parametrize("before", ["megatron.training", "megatron.core"])
def test_a_patched_megatron_may_be_imported_by_another_package_of_it(in_process, before):
    """As by a script that imports from megatron.training first; but nothing of megatron.core may be there."""
    in_process(f"""
        import sys, types
        for name in ("megatron.core", "{before}.global_vars"):
            sys.modules[name] = types.ModuleType(name)
        from recover_megatron import hostdevice
        try:
            hostdevice.activate("megatron.core")
        except hostdevice.HostDeviceError as error:
            assert "megatron.core.global_vars is imported already" in str(error)
        assert hostdevice.is_active() == ("{before}" == "megatron.training")
    """)


def test_tensors_put_on_cuda_stay_on_the_host_in_every_thread(in_process):
    in_process("""
        import threading
        from recover_megatron import hostdevice
        hostdevice.activate()
        import torch
        def place():
            device = torch.cuda.current_device()
            made = [torch.zeros(2, device="cuda"), torch.tensor([1.0], device=device), torch.empty(1, device="cuda:0")]
            made += [torch.ones(2).cuda(device), torch.ones(2).to("cuda", torch.float64), torch.ones(2).to(device)]
            made += [torch.empty_like(made[0], device="cuda")]
            made += [torch.ones(2).new_empty((3,), device=torch.device("cuda")), torch.nn.Linear(2, 2).cuda().weight]
            places.append({t.device.type for t in made})
            assert made[4].dtype == torch.float64
        places = []
        place()
        thread = threading.Thread(target=place)
        thread.start()
        thread.join()
        assert places == [{"cpu"}, {"cpu"}], places
        assert torch.zeros(1, device="meta").device.type == "meta"
        assert torch.ones(2).to(torch.int64).dtype == torch.int64
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type(torch.float64).dtype == torch.float64
    """)


def test_the_devices_and_the_hosts_random_numbers_are_independent(in_process):
    in_process("""
        from recover_megatron import hostdevice
        hostdevice.activate()
        import torch
        torch.manual_seed(7)
        host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
        first = torch.nn.functional.dropout(torch.ones(64))         # draws from the device's
        assert torch.equal(torch.get_rng_state(), host) and not torch.equal(torch.cuda.get_rng_state(), device)
        moved = torch.cuda.get_rng_state()
        seeds = torch.empty(8, dtype=torch.int64).random_()         # draws from the host's
        assert torch.equal(torch.cuda.get_rng_state(), moved) and not torch.equal(torch.get_rng_state(), host)
        torch.cuda.set_rng_state(device)
        assert torch.equal(torch.nn.functional.dropout(torch.ones(64)), first)
        torch.set_rng_state(host)
        assert torch.equal(torch.empty(8, dtype=torch.int64).random_(), seeds)
        torch.cuda.manual_seed(11)
        at_11 = torch.cuda.get_rng_state()
        torch.rand(3)
        torch.cuda.manual_seed(11)
        assert torch.equal(torch.cuda.get_rng_state(), at_11)
        torch.manual_seed(7)                                        # seeds both, as with a GPU
        assert torch.equal(torch.get_rng_state(), host) and torch.equal(torch.cuda.get_rng_state(), device)
        own = torch.Generator().manual_seed(1)
        before = torch.get_rng_state()
        torch.empty(8, dtype=torch.int64).random_(generator=own)
        assert torch.equal(torch.get_rng_state(), before)
    """)


@pytest.mark.parametrize("workers", [0, 1])
def test_making_a_data_iterator_does_not_shift_the_devices_stream(in_process, workers):
    in_process(f"""
        from recover_megatron import hostdevice
        hostdevice.activate()
        import torch
        device, host = torch.cuda.get_rng_state(), torch.get_rng_state()
        loader = torch.utils.data.DataLoader(range(4), num_workers={workers}, pin_memory=True, shuffle=True)
        assert sorted(int(x) for x in loader) == [0, 1, 2, 3]
        assert torch.equal(torch.cuda.get_rng_state(), device)
        assert not torch.equal(torch.get_rng_state(), host)
    """)


def test_gloo_multiplies_by_a_factor_before_it_sums_and_leaves_what_is_scattered_as_it_was(in_process, tmp_path):
    in_process(f"""
        import os
        from recover_megatron import hostdevice
        hostdevice.activate()
        import torch, torch.distributed as dist
        other = os.fork()
        rank = int(other == 0)
        dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 2), rank=rank, world_size=2)
        quarter = dist._make_nccl_premul_sum(0.25)
        mine = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (1 + 2 * rank)  # the sum of both is 4 times rank 0's
        whole = mine.clone()
        dist.all_reduce(whole, op=quarter)
        assert whole.tolist() == [1, 2, 3, 4], whole
        for factor in (0.25, torch.tensor([0.25])):
            part, sent = torch.empty(2), mine.clone()
            dist.reduce_scatter_tensor(part, sent, dist._make_nccl_premul_sum(factor), async_op=True).wait()
            assert part.tolist() == [[1, 2], [3, 4]][rank] and torch.equal(sent, mine), part
        dist.reduce_scatter(part, list(sent.split(2)), quarter)
        assert part.tolist() == [[1, 2], [3, 4]][rank] and torch.equal(sent, mine), part
        dist.all_reduce(part)
        assert part.tolist() == [4, 6], part
        parameter = torch.nn.Parameter(mine)
        dist.all_reduce(parameter, quarter)  # as the others: not a matter of autograd
        assert parameter.tolist() == [1, 2, 3, 4], parameter
        dist.destroy_process_group()
        if other:
            assert os.waitpid(other, 0)[1] == 0
    """)


def test_the_maximum_and_minimum_over_gloo_keep_a_nan_of_any_rank_at_any_place(in_process, tmp_path):
    in_process(f"""
        import os
        from recover_megatron import hostdevice
        hostdevice.activate()
        import torch, torch.distributed as dist
        first = os.fork()
        second = os.fork() if first else None
        rank = 0 if first == 0 else 1 if second == 0 else 2
        dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 3), rank=rank, world_size=3)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for op, least in ((dist.ReduceOp.MAX, 3.0), (dist.ReduceOp(dist.ReduceOp.MIN), 1.0)):
                for size in (1, 7, 64, 1000):
                    for bad in range(3):
                        for places in ([0], [size // 2], [size - 1], range(size)):
                            mine = torch.full((size,), rank + 1.0, dtype=dtype)
                            expected = torch.full((size,), least, dtype=dtype)
                            expected[list(places)] = torch.nan
                            if rank == bad:
                                mine[list(places)] = torch.nan
                            work = dist.all_reduce(mine, op, async_op=size == 7)
                            assert (work is not None) == (size == 7) and (work is None or work.wait())
                            assert torch.equal(mine.isnan(), expected.isnan()), (dtype, op, size, bad, mine)
                            assert torch.equal(mine.nan_to_num(9), expected.nan_to_num(9)), (dtype, op, size, bad, mine)
        largest = torch.tensor([rank, torch.nan if rank == 1 else 0.0])
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
        while not work.is_completed():
            pass
        assert largest[0] == 2 and largest[1].isnan(), largest
        infinite = torch.nn.Parameter(torch.tensor([torch.inf if rank == 1 else 0.0, -torch.inf, rank]))
        dist.all_reduce(infinite, op=dist.ReduceOp.MAX)
        assert infinite.tolist() == [torch.inf, -torch.inf, 2], infinite
        counts = torch.tensor([rank, -rank])
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        assert counts.tolist() == [2, 0]
        with dist._coalescing_manager():  # as without the host device: the operation is made when this ends
            dist.all_reduce(infinite.detach().mul_(rank + 1), op=dist.ReduceOp.MIN)
        assert infinite[2] == 2 and infinite[1] == -torch.inf, infinite
        dist.destroy_process_group()
        for other in (first, second) if rank == 2 else ():
            assert os.waitpid(other, 0)[1] == 0
    """)


def test_a_group_of_gloo_has_one_thread_however_it_is_made(in_process):
    """Two write the name of the last operation at once; a long name's memory is then freed twice."""
    in_process("""
        import os
        import torch
        import torch.distributed as dist
        from recover_megatron import hostdevice
        hostdevice.activate()
        for interface in ("", "lo"):
            if interface:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
            assert isinstance(gloo, dist.ProcessGroupGloo)
            assert gloo.options._threads == 1, gloo.options._threads
            part = torch.ones(2)
            dist.all_reduce(part)
            dist.destroy_process_group()
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        assert dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options).options._threads == 1
        # A newer torch says more than a timeout, which its options have, too: here one that this torch has.
        made = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, global_ranks_in_group=[7])
        assert (made.options._threads, made.options.global_ranks_in_group) == (1, [7])
    """)


def test_the_document_lists_every_replaced_name(in_process):
    text = in_process("""
        from recover_megatron.hostdevice import replacements
        print(*(entry.path for entry in replacements.table()), sep="\\n")
    """)
    documented = DOCUMENT.read_text()
    assert [name for name in text.split() if f"`{name}`" not in documented] == []


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
    with pytest.raises(hostdevice.CudaBroken, match="exited with -11"):
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
