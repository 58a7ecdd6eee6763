"""A recipe's own --spec makes a hybrid model of the local transformer's modules."""

import pytest

PREPARED = """
import torch
import torch.nn.functional as F
from recover_megatron import hostdevice
hostdevice.activate()
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from recover_megatron.hostdevice import hybrid
local = hybrid.local_modules()
"""


@pytest.mark.slow
def test_nothing_of_transformer_engine_is_left_in_the_specs(in_process):
    in_process(
        PREPARED
        + """
from megatron.core.models.mamba import mamba_layer_specs
from megatron.core.ssm.gated_delta_net import HAVE_FLA
from megatron.core.ssm.mamba_mixer import HAVE_MAMBA_SSM, MAMBA_HAS_STATE_DTYPE
from megatron.core.utils import is_causal_conv1d_min_version, is_mamba_min_version
spec = hybrid_layer_specs.hybrid_stack_spec
assert mamba_layer_specs.mamba_stack_spec is spec
assert "Mock" not in str(spec) and "extensions.transformer_engine" not in str(spec), spec
fused = local["TELayerNormColumnParallelLinear"]
assert spec.submodules.mamba_layer.submodules.mixer.submodules.in_proj is fused
assert spec.submodules.mlp_layer.submodules.mlp.keywords["submodules"].linear_fc1 is fused
assert spec.submodules.mtp_block_spec.submodules.layer_specs[0].submodules.enorm is local["TENorm"]
assert hybrid_block.TENorm is local["TENorm"]
assert HAVE_FLA and HAVE_MAMBA_SSM and MAMBA_HAS_STATE_DTYPE
assert is_mamba_min_version("2.0.0") and is_causal_conv1d_min_version("1.4.0")     # packed sequences in training
"""
    )


@pytest.mark.slow
def test_the_norm_and_the_product_are_one_module_with_transformer_engines_names(in_process):
    in_process(
        PREPARED
        + """
from types import SimpleNamespace
from megatron.core.transformer.transformer_config import TransformerConfig
group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
for norm in ("LayerNorm", "RMSNorm"):
    for centred in (False, True):
        config = TransformerConfig(num_layers=2, hidden_size=6, num_attention_heads=2, normalization=norm,
                                   layernorm_zero_centered_gamma=centred, use_cpu_initialization=True,
                                   params_dtype=torch.float64, perform_initialization=True)
        module = local["TELayerNormColumnParallelLinear"](
            6, 4, config=config, init_method=config.init_method, bias=False, skip_bias_add=False, is_expert=False,
            tp_comm_buffer_name="fc1", tp_group=group, name="in_proj", gather_output=False)
        names = {"weight", "layer_norm_weight"} | ({"layer_norm_bias"} if norm == "LayerNorm" else set())
        assert {name for name, _ in module.named_parameters()} == names
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}
        assert module.layer_norm_weight.sequence_parallel is False
        assert torch.equal(module.layer_norm_weight, torch.full((6,), 0.0 if centred else 1.0, dtype=torch.float64))
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        x = torch.randn(3, 2, 6, dtype=torch.float64)
        weight = module.layer_norm_weight + (1 if centred else 0)
        if norm == "LayerNorm":
            normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * weight
            normed = normed + module.layer_norm_bias
        else:
            normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        ours, bias = module(x)
        assert bias is None
        torch.testing.assert_close(ours, normed @ module.weight.t())
"""
    )


@pytest.mark.slow
def test_documents_of_a_sample_are_each_what_they_are_alone(in_process):
    in_process(
        PREPARED
        + """
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=3, hidden_size=16, num_attention_heads=2, normalization="RMSNorm", add_bias_linear=False,
    hidden_dropout=0.0, attention_dropout=0.0, mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2,
    linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_conv_kernel_dim=4, attention_softmax_in_fp32=True, activation_func=F.silu)
model = HybridModel(config, hybrid_layer_specs.hybrid_stack_spec, vocab_size=32, max_sequence_length=16,
                    hybrid_layer_pattern="MG*", position_embedding_type="none")
tokens = torch.randint(32, (1, 16))
borders = torch.tensor([0, 3, 4, 11, 16], dtype=torch.int32)

def logits(tokens, borders=None):
    packed = None if borders is None else PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=16, max_seqlen_kv=16,
        total_tokens=tokens.shape[1])
    return model(tokens, torch.arange(tokens.shape[1])[None], None, packed_seq_params=packed)

whole = logits(tokens, borders)
alone = [logits(tokens[:, first:end]) for first, end in zip(borders[:-1].tolist(), borders[1:].tolist())]
torch.testing.assert_close(whole, torch.cat(alone, dim=1))
one = logits(tokens)
assert (one - whole)[:, :3].abs().max() < 1e-5 < (one - whole)[:, 3:].abs().amax(dim=-1).min(), "no border is seen"
"""
    )
