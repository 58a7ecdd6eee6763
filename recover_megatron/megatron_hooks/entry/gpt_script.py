"""The functions of a GPT pre-training script, for the Megatron-Core wheel (0.19), which has no script.

If Megatron is a checkout, `program` uses the checkout's pretrain_gpt.py instead.  This module gives Megatron's
pretrain() the same five parts as that script: the batch, the loss, the forward step, the datasets, and the ranks that
have an embedding.  tests/megatron_hooks/test_parity.py compares their results with the checkout's, bitwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

SPIKE = 10
"""A loss at least this many times the largest of the first 100 losses is a spike (--check-for-spiky-loss)."""

FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)
"""Names of a batch's fields.  A field is None if this worker's pipeline stage or its flags do not use it."""

Batch = dict[str, Any]

stimer = StragglerDetector()


# ---- the batch ---------------------------------------------------------------------------------------------------


def _predicts_further_tokens(vp_stage: int | None) -> bool:
    """Return whether this worker has multi-token-prediction layers, so that even a middle stage needs the batch."""
    return _stage_predicts_further_tokens(mpu.get_pipeline_model_parallel_rank(), vp_stage)


@cache
def _stage_predicts_further_tokens(stage: int, vp_stage: int | None) -> bool:
    """Return whether ``stage`` has multi-token-prediction layers; cached by stage: a worker may change its stage."""
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _needs_tokens(vp_stage: int | None) -> bool:
    return is_first_or_last_pipeline_stage(vp_stage) or _predicts_further_tokens(vp_stage)


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return this worker's part of the next microbatch.

    Tensor rank 0 reads the microbatch and broadcasts it to the other tensor ranks; each context rank uses a slice.
    """
    args = get_args()
    packed = args.sft or args.dataloader_inter_document_masking
    batch: Batch = dict.fromkeys(FIELDS)
    if not _needs_tokens(vp_stage) and not packed:
        return batch

    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        assert data_iterator is not None, "tensor rank 0 of this stage has no data iterator"
        read = next(data_iterator)
        for name in FIELDS:
            if read.get(name) is not None:
                batch[name] = read[name].cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_predicts_further_tokens(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)

    if not _needs_tokens(vp_stage):
        # On a middle stage only attention over packed sequences uses the batch, and needs only the sequence borders.
        borders = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        return {name: batch[name] if name in borders else None for name in FIELDS}
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )


def _packed_sequences(batch: Batch) -> PackedSeqParams | None:
    """Return the sequence borders that attention needs for a packed batch; None for a plain batch."""
    if batch["cu_seqlens"] is None:
        return None
    real = batch["cu_seqlens"].squeeze(0)
    padded = None if batch["cu_seqlens_padded"] is None else batch["cu_seqlens_padded"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(real)  # the logged FLOPs count real tokens, not padding
    used = real if padded is None else padded
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=used,
        cu_seqlens_kv=used,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if batch["local_cp_size"] is None else int(batch["local_cp_size"].item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=get_args().seq_length,
    )


# ---- the loss ----------------------------------------------------------------------------------------------------


@cache
def _distillation_loss() -> Callable[..., Any]:
    """Return the function that computes the loss against a teacher's stored logits (--logits-load-dir).

    Cached, so that the reader of the logits is opened once per process.
    """
    from megatron.training.distillation import LossFuncCallable

    args = get_args()
    return LossFuncCallable(
        logprobs_dir=args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        prefetch_factor=args.logits_load_prefetch_factor,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
    )


def _check_loss(loss: torch.Tensor) -> None:
    """Report a NaN or infinite loss (fatal) or a spike (not fatal) to Megatron's rerun machine, if flags request it."""
    args = get_args()
    machine = get_rerun_state_machine()
    # The tolerance is 0, because the forward pass is deterministic and a rerun must give the same number.
    report = partial(machine.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        report(rejection_func=torch.isnan, message="found NaN in local forward loss calculation", fatal=True)
        report(rejection_func=torch.isinf, message="found Inf in local forward loss calculation", fatal=True)
    if args.check_for_spiky_loss:
        spikes = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        report(rejection_func=spikes, message="Spiky loss", fatal=False)


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of one microbatch.

    Args:
        loss_mask: [batch, sequence], 0 where a token does not count.
        output: [batch, sequence], the model's loss per token.
        model: for a loss that depends on the model (distillation).

    Returns:
        The sum over the counted tokens (float32), their number (int32), and the values to log: {name: [sum, number]}.
    """
    if get_args().logits_load_dir is not None:
        loss, tokens, logged = _distillation_loss()(loss_mask, output, model=model)
    else:
        mask = loss_mask.view(-1).float()
        loss = torch.sum(output.view(-1).float() * mask)
        tokens = mask.sum().detach().to(torch.int)
        logged = {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}
    _check_loss(loss)
    return loss, tokens, logged


def forward_step(data_iterator: Iterator[Batch] | None, model: Any, return_schedule_plan: bool = False) -> Any:
    """Run one microbatch forward.

    Returns (output, function that computes the loss from the output on the last stage), as Megatron's schedules expect.
    With --overlap-moe-expert-parallel-comm the output is a schedule plan.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = _packed_sequences(batch)
    timers("batch-generator").stop()

    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    losses = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with stimer:
        if return_schedule_plan:
            assert get_args().overlap_moe_expert_parallel_comm, (
                "a schedule plan is for --overlap-moe-expert-parallel-comm"
            )
            output = model.build_schedule_plan(*inputs, **losses)
        else:
            output = model(*inputs, **losses, packed_seq_params=packed)
    return output, partial(loss_func, batch["loss_mask"], model=model)


# ---- the datasets ------------------------------------------------------------------------------------------------


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            sequences_per_dataset = json.load(file)
    settings: dict[str, Any] = dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences_per_dataset,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    if not args.fim_data:
        return GPTDatasetConfig(**settings)
    fim_tokens = {name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")}
    return GPTFIMDatasetConfig(
        **settings,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_extra_tokens=fim_tokens,
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


def _dataset_type(args: Any) -> type:
    if args.sft:
        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    return GPTFIMDataset if args.fim_data else GPTDataset


def train_valid_test_datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    """Return the datasets (train, validation, test) with the given numbers of samples.

    Every worker calls this function; a worker that reads no batches gets (None, None, None).
    """
    args = get_args()

    def reads_batches() -> bool:
        # With packed sequences (--sft) every stage needs the sequence borders.
        return mpu.get_tensor_model_parallel_rank() == 0 and (args.sft or _needs_tokens(vp_stage))

    print_rank_0("> building train, validation, and test datasets for GPT ...")
    datasets = BlendedMegatronDatasetBuilder(_dataset_type(args), samples, reads_batches, _dataset_config(args)).build()
    print_rank_0("> finished creating GPT datasets ...")
    return datasets


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank builds its own


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that have a word embedding.

    These are the first rank, the last rank if its output layer is tied to the embedding, and ranks with multi-token
    prediction.
    """
    holders = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            holders.add(pp_ranks[-1])
        holders.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(holders)
