"""Random numbers that Megatron keeps: each place where it draws some is known, and what becomes of them."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe.moe_utils import RandomSTEShared

from recover_megatron.megatron_hooks.gradients import microbatches

DRAWS = {
    "weights, which travel with the state": {
        "core/models/vision/clip_vit_model.py CLIPViTModel.__init__",
        "core/models/vision/radio.py RADIOViTModel.__init__",
        "core/models/vision/radio.py fp8_pad_hook",
        "core/models/vision/vit_model.py KimiLearned2DPosEmbed.__init__",
        "core/models/vision/vit_model.py QwenLearnedPosEmbed.__init__",
        "core/ssm/gated_delta_net.py GatedDeltaNet.reset_parameters",
        "core/ssm/gated_delta_net/common.py _GDNBase.reset_parameters",
        "core/ssm/gated_delta_net/gdn2.py GatedDeltaNet2._reset_dt_bias",
        "core/ssm/gated_delta_product.py GatedDeltaProductMixer.__init__",
        "core/ssm/mamba_mixer.py MambaMixer.__init__",
        "core/transformer/hyper_connection.py HyperConnectionModule._init_weights",
    },
    "used in one forward pass, by the states that are set for each microbatch": {
        "core/fusions/fused_bias_dropout.py _bias_dropout_add_func",
        "core/models/audio/nemo_audio_preprocessing.py AudioToMelSpectrogramPreprocessor.get_features",
        "core/models/vision/radio.py RADIOViTModel._get_pos_embeddings",
        "core/models/vision/radio.py RADIOViTModel.apply_pos_enc",
        "core/transformer/moe/moe_utils.py RandomSTE.forward",
        "core/transformer/multi_token_prediction.py _mix_hidden_state_history",
    },
    "kept for the run: drawn by the layer's number": {
        "core/transformer/moe/moe_utils.py RandomSTEShared.forward",
    },
    "a stream of the process, which draws only where its augmentation is switched on; no flag of Megatron does so": {
        "core/models/audio/nemo_audio_preprocessing.py AudioToMelSpectrogramPreprocessor.__init__",
    },
    "by the seed and the sample, or the epoch; GPTFIMDataset's stream is made one by the sample": {
        "core/datasets/bert_dataset.py BERTMaskedWordPieceDataset.__getitem__",
        "core/datasets/gpt_dataset.py GPTDataset._build_document_sample_shuffle_indices",
        "core/datasets/gpt_dataset.py MockGPTLowLevelDataset.__init__",
        "core/datasets/masked_dataset.py MaskedWordPieceDataset._create_masked_lm_predictions",
        "core/datasets/t5_dataset.py T5MaskedWordPieceDataset.__getitem__",
        "training/datasets/data_samplers.py MegatronPretrainingRandomSampler.__iter__",
        "training/datasets/data_samplers.py RandomSeedDataset.__getitem__",
        "training/datasets/fim_dataset.py GPTFIMDataset.__init__",
    },
    "states are saved and set": {
        "core/distributed/fsdp/mcore_fsdp_adapter.py _get_rng_state_dict",
        "core/distributed/fsdp/mcore_fsdp_adapter.py _load_rng_state_dict",
        "core/rerun_state_machine.py RerunStateMachine._restore_state",
        "core/rerun_state_machine.py RerunStateMachine._save_state",
        "training/checkpointing.py get_rng_state",
        "training/checkpointing.py load_checkpoint",
        "training/initialize.py _set_random_seed",
    },
    "thrown away: warms up, measures, or shows how a layer is called": {
        "core/models/audio/nemo_audio_preprocessing.py AudioToMelSpectrogramPreprocessor.input_example",
        "core/optimizer/cpu_offloading/hybrid_optimizer.py HybridDeviceOptimizer.dummy_step",
        "training/gpu_sniff_test.py bench_all_reduce",
        "training/gpu_sniff_test.py bench_all_to_all",
        "training/gpu_sniff_test.py bench_gemms",
        "training/gpu_sniff_test.py bench_reduce_scatter",
        "training/gpu_sniff_test.py bench_sendrecv",
        "training/initialize.py _warmup_jit_function",
    },
    "--recover refuses it": {
        "core/fault_injector.py setup_fault_injection",
        "core/rerun_state_machine.py RerunErrorInjector.maybe_inject",
        "training/ft_integration.py maybe_setup_simulated_fault",
    },
}
"""What becomes of the numbers -> the functions of Megatron 0.18 to 0.20 that draw them."""
IN_PLACE = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "kaiming_normal_", "kaiming_uniform_", "log_normal_",
    "normal_", "orthogonal_", "random_", "sparse_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_",
}  # fmt: skip
OF_TORCH = {
    "bernoulli", "dropout", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm",
}  # fmt: skip


MAY_DRAW = re.compile(rf"\b(random|{'|'.join(IN_PLACE | OF_TORCH)})\b")


def draws(call: ast.Call) -> bool:
    """Whether it draws random numbers, or sets up what does."""
    if not isinstance(call.func, ast.Attribute):
        return False
    module, name = ast.unparse(call.func.value), call.func.attr
    at = module.partition(".")[0]
    return name in IN_PLACE or (at == "torch" and name in OF_TORCH) or module in {"random", "np.random", "numpy.random"}


def drawing(megatron: Path) -> Iterator[str]:
    """The functions that draw.  ``megatron``: the folder of the package."""

    def within(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and draws(child):
                yield ".".join(names)
            own = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            yield from within(child, (*names, child.name) if own else names)  # type: ignore[attr-defined]

    for package in ("core", "training"):
        for path in sorted((megatron / package).rglob("*.py")):
            where = str(path.relative_to(megatron))
            if not where.startswith(("core/inference/", "core/tokenizers/")) and MAY_DRAW.search(
                text := path.read_text(encoding="utf-8")
            ):
                yield from (f"{where} {name}" for name in within(ast.parse(text), ()))


def test_what_becomes_of_each_random_number_that_this_megatron_draws_is_known() -> None:
    found = set(drawing(Path(megatron.core.__file__).parents[1]))
    assert found - set().union(*DRAWS.values()) == set()
    assert "core/transformer/moe/moe_utils.py RandomSTEShared.forward" in found


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[..., Any]]:
    """Start a process, in which a router gets its bias; its generators are those of a microbatch."""
    monkeypatch.setattr(microbatches, "get_args", lambda: SimpleNamespace(seed=5))

    def started(microbatch: int) -> Callable[..., Any]:
        monkeypatch.setattr(RandomSTEShared, "_cache", {})
        torch.manual_seed(microbatch)

        def stock(logits: torch.Tensor, std: float, layer: int | None = None) -> torch.Tensor:
            if std > 0:
                return logits + 100
            return logits + RandomSTEShared._cache[layer]

        return microbatches._drawn_by_layer(stock)

    return started


def test_the_bias_that_a_router_keeps_is_that_of_its_layer_whatever_the_process_runs_first(start: Any) -> None:
    logits, wide = torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(1, 20_000)
    biased = start(1)
    first, second = biased(logits, -0.5, 1), biased(logits, -0.5, 2)
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, second)
    assert torch.equal(biased(logits, -0.5, 1), first), "kept"
    again = start(2)
    assert torch.equal(again(logits, -0.5, layer_number=2), second)
    assert torch.equal(again(logits, -0.5, layer_number=1), first)
    assert float(again(wide, -0.5, 3).std()) == pytest.approx(0.5, rel=0.05)
    assert torch.equal(again(logits, 0.5, 1), logits + 100), "drawn for each microbatch"
    assert set(RandomSTEShared._cache) == {1, 2, 3}


def test_seeding_a_microbatch_formats_no_call_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed formats it once for each kind of accelerator that is unused, which takes milliseconds."""
    formatted: list[str] = []
    monkeypatch.setattr(traceback, "format_stack", lambda *_: (formatted.append("once"), formatted)[1])
    monkeypatch.setattr(microbatches, "get_args", lambda: SimpleNamespace(seed=5))
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(get_states=dict))
    seeds = microbatches.MicrobatchSeeds(torch.device("cpu"))
    drawn = []
    for microbatch in (3, 4, 3):
        seeds.seed(2, microbatch, 0)
        drawn.append(torch.rand(4).tolist())
    assert (drawn[0] == drawn[2], drawn[0] == drawn[1]) == (True, False)
    assert not formatted
    torch.manual_seed(1)
    assert formatted, "torch does it in another way: this test would notice nothing"
