"""recover_megatron: resilient pre-training for Megatron-LM, and a library for other training loops.

If GPUs die in the middle of a step, the survivors finish the step, with exactly the same microbatches.
docs/architecture.md shows the layers and the six files to read first, docs/instep.md the path of one gradient through
the layers.

``ElasticDataParallel``, ``StepResult`` and ``run`` are the library (docs/integrate.md).  Importing this package imports
neither torch nor Megatron: each layer, and each of these three names, imports what it needs on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recover_megatron.elastic import ElasticDataParallel as ElasticDataParallel
    from recover_megatron.elastic import StepResult as StepResult
    from recover_megatron.elastic import run as run

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a name of the library on first access and return it."""
    if name in ("ElasticDataParallel", "StepResult", "run"):
        from recover_megatron import elastic

        return getattr(elastic, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
