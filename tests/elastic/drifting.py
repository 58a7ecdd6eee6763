"""``drifting.py FOLDER``: examples/plain_pytorch.py, of which worker 1 has another weight after step 3.

The states are compared after every second step.  Each worker leaves its state in FOLDER/worker-ID.pt.
"""

import sys
from pathlib import Path

import torch

from examples import plain_pytorch as example
from recover_megatron import ElasticDataParallel, run

elastic = ElasticDataParallel(example.model, example.optimizer, microbatches=16, verify_interval=2)
for done in run(elastic, example.microbatch, 7):
    print(f"iteration {done.step} loss {done.loss!r}", flush=True)
    if (done.step, elastic.worker) == (3, 1):
        with torch.no_grad():
            example.model[2].bias += 1
torch.save(elastic.state_dict(), Path(sys.argv[1]) / f"worker-{elastic.worker}.pt")
