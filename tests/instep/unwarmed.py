"""pretrain_gpt_recover.py without what Megatron draws at its start to warm up fused functions.

It is as much as a context-parallel rank's part of the context, and what is drawn for the model's first parameters
comes after it in the same stream: models that are to be compared would begin differently.
"""

from megatron.training import initialize

import pretrain_gpt_recover

assert callable(initialize._warmup_jit_function)
initialize._warmup_jit_function = lambda **sizes: None
pretrain_gpt_recover.main()
