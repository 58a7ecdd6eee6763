import torch
from megatron.bridge.training.checkpointing import DefaultCheckpointManager  # noqa: F401
from megatron.bridge.training.eval import evaluate_and_print_results
from megatron.bridge.training.initialize import destroy_global_state
from megatron.bridge.training.utils import flop_utils
from megatron.bridge.training.utils.train_utils import calc_params_l2_norm, training_log
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import check_param_hashes_across_dp_replicas


def train(
    forward_step_func, model, optimizer, scheduler, train_data_iterator, valid_data_iterator, global_state,
    checkpoint_manager, pg_collection, process_non_loss_data_func=None, non_loss_data_func=None, callback_manager=None,
):  # fmt: skip
    cfg, counted, totals = global_state.cfg, global_state.train_state, {}
    schedule = get_forward_backward_func(pp_size=1, vp_size=None)
    replicas = pg_collection.dp.size()
    for chunk in model:
        chunk.train()
    global_state.timers("interval-time", log_level=0).start(barrier=True)
    while counted.step < cfg.train.train_iters:
        update_num_microbatches(counted.consumed_train_samples, consistency_check=True)
        losses, skipped, *_, grad_norm, zeros, _ = train_step(
            forward_step_func, train_data_iterator, model, optimizer, scheduler, global_state, pg_collection, schedule,
            None,
        )  # fmt: skip
        counted.step += 1
        batch = replicas * cfg.train.micro_batch_size * get_num_microbatches()
        counted.consumed_train_samples += batch
        counted.floating_point_operations_so_far += flop_utils.num_floating_point_operations(cfg, batch_size=batch)
        norm = calc_params_l2_norm(model, cfg.model)
        training_log(
            losses, totals, cfg.optimizer.lr, None, 1.0, False, skipped, grad_norm, norm, zeros, cfg, global_state,
            None, model, pg_collection=pg_collection,
        )  # fmt: skip
        if counted.step % cfg.validation.eval_interval == 0:
            of = f"iteration {counted.step}"
            evaluate_and_print_results(
                global_state, of, forward_step_func, valid_data_iterator, model, cfg.model, pg_collection
            )
            assert check_param_hashes_across_dp_replicas(model, cross_check=True)
        if cfg.checkpoint.save and counted.step % cfg.checkpoint.save_interval == 0:
            checkpoint_manager.save(
                dict(
                    state=global_state, model=model, optimizer=optimizer, opt_param_scheduler=scheduler,
                    num_floating_point_operations_so_far=counted.floating_point_operations_so_far,
                )
            )  # fmt: skip


def train_step(
    forward_step_func, data_iterator, model, optimizer, scheduler, global_state, pg_collection, forward_backward_func,
    p2p_communicator,
):  # fmt: skip
    cfg = global_state.cfg
    again = get_rerun_state_machine()
    while again.should_run_forward_backward(data_iterator):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward_func(
            forward_step_func=forward_step_func, data_iterator=data_iterator, model=model,
            num_microbatches=get_num_microbatches(), seq_length=cfg.model.seq_length,
            micro_batch_size=cfg.train.micro_batch_size, decoder_seq_length=cfg.model.seq_length, forward_only=False,
        )  # fmt: skip
    save, leave, code = again.should_checkpoint_and_exit()
    updated, grad_norm, zeros = optimizer.step()
    if updated:
        scheduler.step(get_num_microbatches() * cfg.train.micro_batch_size * cfg.data_parallel_size)
    value = torch.vstack([loss["lm loss"].view(-1) for loss in losses]).sum(dim=0)
    torch.distributed.all_reduce(value, group=pg_collection.dp_cp)
    return {"lm loss": value[0] / value[1]}, int(not updated), save, leave, code, grad_norm, zeros, None


def finish(global_state):
    destroy_global_state()
