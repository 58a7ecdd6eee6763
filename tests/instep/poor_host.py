"""pretrain_gpt_recover.py on a host without memory: poor_host.py WORKER flags...  The worker sees 1,000 bytes."""

import os
import sys

import pretrain_gpt_recover
from recover_megatron.megatron_hooks import memory_tier

if os.environ["RANK"] == sys.argv.pop(1):
    memory_tier.available_memory = lambda: 1000
pretrain_gpt_recover.main()
