"""The stand-ins for apex compute what torch computes: they are the numerics of every run on the host."""

import copy
import inspect
import types

import pytest
import torch

from recover_megatron.hostdevice import apex_stub


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_fused_adam_steps_as_torchs_adam(decoupled):
    torch.manual_seed(3)
    start = [torch.randn(5, 7, dtype=torch.float64), torch.randn(11, dtype=torch.float64)]
    mine = [torch.nn.Parameter(p.clone()) for p in start]
    theirs = [torch.nn.Parameter(p.clone()) for p in start]
    values = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    ours = apex_stub.FusedAdam(mine, adam_w_mode=decoupled, **values)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **values)
    for _ in range(20):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        reference.step()
    for a, b, first in zip(mine, theirs, start, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(ours.state[a]["exp_avg"], reference.state[b]["exp_avg"], rtol=1e-12, atol=1e-14)
        assert (a - first).abs().min() > 0


def test_fused_adam_without_bias_correction_is_the_plain_formula():
    p = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    p.grad = torch.tensor([0.5], dtype=torch.float64)
    apex_stub.FusedAdam([p], lr=0.1, bias_correction=False, betas=(0.9, 0.99), eps=0.0).step()
    m, v = 0.1 * 0.5, 0.01 * 0.25
    assert p.item() == pytest.approx(2.0 - 0.1 * m / v**0.5, rel=1e-12)


def test_fused_adam_counts_steps_per_group_and_restores_them():
    p, idle = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = apex_stub.FusedAdam([p, idle])
    for _ in range(3):
        p.grad = torch.ones(2)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())  # it refers to the live tensors
    assert saved["param_groups"][0]["step"] == 3
    assert torch.equal(idle, torch.ones(2))
    q = torch.nn.Parameter(p.detach().clone())
    again = apex_stub.FusedAdam([q, torch.nn.Parameter(torch.ones(2))])
    again.load_state_dict(saved)
    for parameter, its_optimizer in ((p, optimizer), (q, again)):
        parameter.grad = torch.full((2,), 0.3)
        its_optimizer.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("memory_efficient", [True, False])
def test_fused_layer_norm_is_torchs(memory_efficient):
    torch.manual_seed(5)
    x = torch.randn(4, 3, 16, requires_grad=True)
    weight, bias = torch.randn(16, requires_grad=True), torch.randn(16, requires_grad=True)
    norm = apex_stub.FusedLayerNormAffineFunction
    assert "memory_efficient" in inspect.getfullargspec(norm.forward).args  # Megatron looks
    mine = norm.apply(x, weight, bias, torch.Size([16]), 1e-5, memory_efficient)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    torch.testing.assert_close(mine, (x - mean) / (variance + 1e-5).sqrt() * weight + bias)
    mine.square().sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in (x, weight, bias))


@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm_is_torchs_and_marks_its_weight(zero_centered):
    config = types.SimpleNamespace(layernorm_zero_centered_gamma=zero_centered, sequence_parallel=True)
    norm, x = apex_stub.RMSNorm(config, 16, 1e-6), torch.randn(4, 16)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    assert norm.weight.sequence_parallel is True
    assert norm.weight.abs().sum() == (0 if zero_centered else 16)


def test_the_stand_ins_are_registered_by_activation_only(in_process):
    in_process("""
        import sys
        from recover_megatron import hostdevice
        from recover_megatron.hostdevice import apex_stub
        assert "apex" not in sys.modules
        hostdevice.activate()
        import apex
        from apex.optimizers import FusedAdam
        assert FusedAdam is apex_stub.FusedAdam
        try:
            import transformer_engine
        except ImportError:
            pass
        else:
            raise AssertionError("TransformerEngine's kernels cannot reach host memory")
    """)


@pytest.mark.parametrize("name", ["apex", "mamba_ssm", "causal_conv1d", "fla"])
def test_who_asks_whether_there_is_such_a_package_gets_an_answer(in_process, name):
    in_process(f"""
        import importlib.util
        from recover_megatron import hostdevice
        hostdevice.activate()
        assert importlib.util.find_spec({name!r}).name == {name!r}
    """)
