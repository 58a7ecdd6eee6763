"""recover_megatron: resilient pre-training for Megatron-LM, and a library for other training loops.

GPUs die in the middle of a step; the step finishes anyway, on the survivors, with exactly the microbatches it would
have had.  docs/architecture.md shows the layers and the six files to read first, docs/instep.md the way of one gradient
through them.

``ElasticDataParallel``, ``StepResult`` and ``run`` are the library (docs/library.md).  Importing this package imports
neither torch nor Megatron: each layer imports what it needs, when it is used; so do these three names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recover_megatron.elastic import ElasticDataParallel as ElasticDataParallel
    from recover_megatron.elastic import StepResult as StepResult
    from recover_megatron.elastic import run as run

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """A name of the library, imported when it is asked for."""
    if name in ("ElasticDataParallel", "StepResult", "run"):
        from recover_megatron import elastic

        return getattr(elastic, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
