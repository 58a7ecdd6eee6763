from megatron.training import print_rank_last


def calc_params_l2_norm(model, model_config, use_megatron_fsdp=False, force_create_fp32_copy=False):
    return float(sum(parameter.detach().double().square().sum() for parameter in model[0].parameters())) ** 0.5


def training_log(
    loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, loss_scale, report_memory_flag, skipped_iter,
    grad_norm, params_norm, num_zeros_in_grad, config, global_state, history_wct, model, *, pg_collection=None,
    log_max_attention_logit=None, loaded_iteration=0, seq_length=None,
):  # fmt: skip
    for name, loss in loss_dict.items():
        total_loss_dict[name] = total_loss_dict.get(name, 0.0) + loss
    counted = global_state.train_state
    print_rank_last(
        f"iteration {counted.step} consumed {counted.consumed_train_samples} "
        f"operations {counted.floating_point_operations_so_far:.0f} losses {total_loss_dict['lm loss'].item():.9e} "
        f"parameters {params_norm:.9e}"
    )
    return report_memory_flag
