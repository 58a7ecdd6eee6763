import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import print_rank_last


def evaluate(
    state, forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose=False,
    non_loss_data_func=None, p2p_communicator=None, pg_collection=None, callback_manager=None, is_test=False,
):  # fmt: skip
    cfg, groups = state.cfg, pg_collection
    for chunk in model:
        chunk.eval()
    of_one = cfg.validation.eval_micro_batch_size * groups.dp.size()
    schedule = get_forward_backward_func(pp_size=1, vp_size=None)
    total = torch.zeros(2)
    with torch.no_grad():
        for _ in range(cfg.validation.eval_iters):
            losses = schedule(
                forward_step_func=forward_step_func, data_iterator=data_iterator, model=model,
                num_microbatches=cfg.validation.eval_global_batch_size // of_one, seq_length=cfg.model.seq_length,
                micro_batch_size=cfg.validation.eval_micro_batch_size, forward_only=True,
            )  # fmt: skip
            its = torch.vstack([loss["lm loss"].view(-1) for loss in losses]).sum(dim=0)
            torch.distributed.all_reduce(its, group=groups.dp_cp)
            total += its
            state.train_state.consumed_valid_samples += cfg.validation.eval_global_batch_size
    for chunk in model:
        chunk.train()
    return {"lm loss": total[0] / total[1]}, None, False


def evaluate_and_print_results(state, prefix, forward_step_func, data_iterator, model, config, pg_collection):
    losses = evaluate(state, forward_step_func, data_iterator, model, None, config, pg_collection=pg_collection)[0]
    print_rank_last(f"validation loss at {prefix}: {losses['lm loss'].item():.9e}")
