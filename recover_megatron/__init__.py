"""recover_megatron: resilient pre-training for Megatron-LM, and a library for other training loops.

If GPUs die in the middle of a step, the surviving workers finish the step, with the same microbatches as without
deaths.  docs/architecture.md shows the layers, and the six files to read first.  docs/instep.md follows one gradient
through the layers.

``ElasticDataParallel``, ``StepResult`` and ``run`` are the library (docs/integrate.md).  Importing this package imports
neither torch nor Megatron; they are imported when one of these three names, or a module that needs them, is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recover_megatron.elastic import ElasticDataParallel as ElasticDataParallel
    from recover_megatron.elastic import StepResult as StepResult
    from recover_megatron.elastic import run as run

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import ``name`` from the library when it is first used, and return it."""
    if name in ("ElasticDataParallel", "StepResult", "run"):
        from recover_megatron import elastic

        return getattr(elastic, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
