"""What cannot run without a GPU is named, all of it at once; what can is not."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

from recover_megatron.hostdevice import flags, host_defaults, never_summed, unsupported
from recover_megatron.hostdevice.flags import norm_of_version_2, outer_sharding

CANNOT = {
    "transformer_impl": "transformer_engine",
    "distributed_backend": "nccl",
    "gradient_accumulation_fusion": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "optimizer_cuda_graph": True,
    "nccl_ub": True,
    "use_sharp": True,
    "tp_comm_overlap": True,
    "symmetric_ar_type": "two_shot",
    "moe_permute_fusion": True,
    "moe_router_fusion": True,
    "moe_token_dispatcher_type": "flex",
    "moe_enable_deepep": True,
    "optimizer_cpu_offload": True,
    "cpu_offloading_num_layers": 1,
    "fine_grained_activation_offloading": True,
    "delay_wgrad_compute": True,
    "batch_invariant_mode": True,
    "hybrid_context_parallel": True,
    "hybrid_layer_pattern": "M-D-|M-*",
    "profile": True,
    "record_memory_history": True,
    "log_straggler": True,
}


def test_a_namespace_without_any_of_the_flags_can_run():
    assert unsupported(argparse.Namespace()) == []


@pytest.mark.parametrize(("name", "value"), CANNOT.items())
def test_each_is_named_with_what_to_do_and_the_file(name, value):
    (line,) = unsupported(argparse.Namespace(**{name: value}))
    assert re.search(r"(leave it out|use|add) .*\(megatron/[\w/]+\.py\)$", line)


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, 0),
        ({"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "fp8"}, 1),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "torch.float16"}, 1),
        ({"bf16": True, "masked_softmax_fusion": True}, 1),
        ({"fp16": True, "masked_softmax_fusion": True}, 1),
        ({"masked_softmax_fusion": True}, 0),
        ({"apply_rope_fusion": True, "position_embedding_type": "rope"}, 1),
        ({"apply_rope_fusion": True, "position_embedding_type": "learned_absolute"}, 0),
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, 1),
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}, 0),
        ({"hybrid_layer_pattern": "M-G+|ME*-/*E"}, 0),
        ({"hybrid_layer_pattern": "M-+", "mla_down_proj_fusion": True}, 1),
        ({"profile": True, "use_pytorch_profiler": True}, 0),
        ({"sft": True, "context_parallel_size": 1, "position_embedding_type": "rope"}, 0),
        ({"sft": True, "context_parallel_size": 2}, 1),
        ({"dataloader_inter_document_masking": True, "context_parallel_size": 2}, 0),
        ({"dataloader_inter_document_masking": True, "context_parallel_size": 2, "mtp_num_layers": 1}, 1),
        ({"dataloader_inter_document_masking": True, "context_parallel_size": 2, "multi_latent_attention": True}, 1),
        ({"dataloader_inter_document_masking": True, "context_parallel_size": 1, "mtp_num_layers": 1}, 0),
        ({"dataloader_inter_document_masking": True, "context_parallel_size": 2, "hybrid_layer_pattern": "M-*"}, 1),
        ({"dataloader_inter_document_masking": True, "context_parallel_size": 2, "hybrid_override_pattern": "G-*"}, 1),
        ({"dataloader_inter_document_masking": True, "context_parallel_size": 2, "hybrid_layer_pattern": "*-*-"}, 0),
        ({"num_experts": 4, "moe_token_dispatcher_type": "alltoall", "tensor_model_parallel_size": 2}, 1),
        ({"num_experts": 4, "moe_token_dispatcher_type": "allgather", "tensor_model_parallel_size": 2}, 0),
        (
            {
                "num_experts": 4,
                "moe_token_dispatcher_type": "alltoall",
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
            },
            0,
        ),
        (
            {
                "cuda_graph_impl": "none",
                "context_parallel_size": 2,
                "multi_latent_attention": True,
                "moe_token_dispatcher_type": "alltoall",
            },
            0,
        ),
    ],
)
def test_flags_that_matter_only_together(values, problems):
    assert len(unsupported(argparse.Namespace(**values))) == problems


def test_instances_of_megatron_fsdp_need_the_flag_without_which_they_are_never_summed():
    apart = {"use_megatron_fsdp": True, "num_distributed_optimizer_instances": 2, "overlap_grad_reduce": False}
    (line,) = never_summed(argparse.Namespace(**apart))
    assert "--num-distributed-optimizer-instances 2 needs --overlap-grad-reduce" in line
    for harmless in (
        {"overlap_grad_reduce": True}, {"num_distributed_optimizer_instances": 1}, {"use_megatron_fsdp": False}
    ):  # fmt: skip
        assert never_summed(argparse.Namespace(**apart | harmless)) == []
    assert never_summed(argparse.Namespace()) == []


def test_an_optimizer_sharded_over_instances_is_warned_of_where_it_is_megatrons_own():
    wrong = {"use_megatron_fsdp": True, "outer_dp_sharding_strategy": "optim"}
    (line,) = outer_sharding(argparse.Namespace(**wrong))
    assert "without dividing them" in line
    for right in ({"outer_dp_sharding_strategy": "no_shard"}, {"use_megatron_fsdp": False}, {"recover": True}):
        assert outer_sharding(argparse.Namespace(**wrong | right)) == []


def test_the_norm_of_version_2_of_megatron_fsdp_is_warned_of_where_it_is_megatrons_own():
    wrong = {"use_megatron_fsdp": True, "megatron_fsdp_version": 2, "clip_grad": 1.0}
    (line,) = norm_of_version_2(argparse.Namespace(**wrong))
    assert "overestimates the gradient norm" in line
    for right in ({"megatron_fsdp_version": 1}, {"clip_grad": 0.0}, {"recover": True}, {"use_megatron_fsdp": False}):
        assert norm_of_version_2(argparse.Namespace(**wrong | right)) == []
    assert never_summed(argparse.Namespace(**wrong, num_distributed_optimizer_instances=2)) == []


def test_all_reasons_come_at_once():
    together = argparse.Namespace(**CANNOT)
    lines = unsupported(together)
    graphs, flex = 2, 1  # three flags of CUDA graphs are one reason, two of the flex dispatcher too
    assert len(set(lines)) == len(CANNOT) - graphs - flex


def test_the_files_named_are_files_of_megatron():
    (top,) = importlib.util.find_spec("megatron").submodule_search_locations
    named = {m for rule in flags.RULES for m in re.findall(r"megatron/[\w/]+\.py", rule.reason)}
    assert [name for name in named if not (Path(top).parent / name).is_file()] == []


def test_the_document_lists_them_all():
    documented = (Path(__file__).parent.parent.parent / "docs" / "reference" / "hostdevice.md").read_text()
    for rule in flags.RULES:
        what, file = rule.reason.partition(": ")[0], re.search(r"megatron/[\w/]+\.py", rule.reason)[0]
        assert re.search(rf"^\| {re.escape(what)} \|.*`{re.escape(file)}`", documented, re.MULTILINE), what


@pytest.mark.parametrize(
    ("variables", "logs"),
    [
        ({}, True),
        ({"RANK": "0", "GROUP_RANK": "1"}, True),
        ({"RANK": "1", "GROUP_RANK": "0"}, False),
        ({"RECOVER_PREPARED": "3", "RECOVER_WORKER_ID": "0", "GROUP_RANK": "0"}, False),
        ({"RECOVER_PREPARED": "3", "GROUP_RANK": "0"}, True),
        ({"RECOVER_PREPARED": "3", "GROUP_RANK": "1"}, False),
    ],
    ids=["alone", "rank 0", "rank 1", "prepared", "fork server of node 0", "fork server of node 1"],
)
def test_one_process_logs_for_the_run(monkeypatch, variables, logs):
    for name in ("RANK", "GROUP_RANK", "RECOVER_PREPARED", "RECOVER_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert flags.speaks() is logs


@pytest.mark.slow
def test_megatrons_own_parser_knows_the_names_and_the_defaults_can_run(fresh_python):
    code = f"""
import sys
from recover_megatron import hostdevice
hostdevice.activate()
from megatron.training.arguments import parse_args
sys.argv = ["x", "--bf16", "--position-embedding-type", "rope"]
stock = parse_args()
missing = [name for name in {list(CANNOT)!r} if not hasattr(stock, name)]
assert missing == ["moe_enable_deepep"] or missing == [], missing
assert len(hostdevice.unsupported(stock)) == 5, hostdevice.unsupported(stock)
sys.argv = ["x", *hostdevice.host_defaults(), *sys.argv[1:]]
assert hostdevice.unsupported(parse_args()) == []
sys.argv += ["--transformer-impl", "transformer_engine"]           # the user's own flag wins, and is named
(line,) = hostdevice.unsupported(parse_args())
assert "--transformer-impl" in line
"""
    done = fresh_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert len(host_defaults()) == 5
