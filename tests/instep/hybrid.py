"""A hybrid model's pre-training script, as Megatron-LM's pretrain_hybrid.py is one, run by a patched Megatron."""

from __future__ import annotations

from megatron.training.argument_utils import hybrid_config_from_args

from recover_megatron.errors import end_process
from recover_megatron.megatron_hooks.entry.gpt_script import forward_step, train_valid_test_datasets_provider
from tests.instep.own_script import call_pretrain

if __name__ == "__main__":
    call_pretrain(train_valid_test_datasets_provider, forward_step, model_config=hybrid_config_from_args)
    end_process()
