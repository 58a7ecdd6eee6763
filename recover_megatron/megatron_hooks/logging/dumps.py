"""Megatron's dumps of layers: traces of routers, gradients, activations, parameters.

install        --moe-routing-trace-path: Megatron truncates a rank's trace files when train() starts.  With --recover, a
               worker that joins a running training appends to the files of the place that it takes
leave          --save-dgrads-interval, --save-activations-interval, --save-tokens-per-expert-interval: Megatron removes
               its hooks on layers at the end of a step; ``leave`` removes them after an interrupted step
of_parameters  --save-params-interval: Megatron writes parameters right after the update, so their gathering must be
               complete by then
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

from megatron.training import get_args

from recover_megatron.megatron_hooks import monkeypatch

_TRACES = "megatron.core.transformer.moe.router_trace"
_LOGGERS = ("megatron.training.dgrad_logging", "megatron.training.activation_logging")
_REMOVERS = ("remove_hooks", "remove_activation_hooks", "remove_tpe_hooks")


def install(known: Callable[[], tuple[int, int]]) -> None:
    """Wrap the constructor of the routers' trace; raises UserError if its signature is unknown.

    ``known``: function that returns (this worker's slot, number of iterations that the run has completed).  The slot
    names the worker's trace files, because no two live workers have the same slot.
    """

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, output_dir: str, max_steps: int, rank: int, *args: Any, **kwargs: Any) -> None:
            slot, made = known()
            if made <= 0:
                return original(self, output_dir, max_steps, rank, *args, **kwargs)
            os.makedirs(output_dir, exist_ok=True)
            with TemporaryDirectory() as scratch:  # in this folder, the constructor truncates no file of the run
                original(self, scratch, max_steps, slot, *args, **kwargs)
            self.output_dir, self._captured_steps, self._stopped = output_dir, made, made >= max_steps
            for name, offset in (("output_path", ""), ("hs_path", "_hs_offset"), ("logits_path", "_logits_offset")):
                path = os.path.join(output_dir, os.path.basename(getattr(self, name)))
                setattr(self, name, path)
                if offset and os.path.exists(path):
                    setattr(self, offset, os.path.getsize(path))
            _end_line(self.output_path)

        return __init__

    monkeypatch.wrap("RouterTracer.__init__", wrapper)


def _end_line(path: str) -> None:
    """Terminate the last line of ``path``, which a killed worker may have left unfinished."""
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def leave() -> None:
    """Remove Megatron's hooks on layers, and drop the hooks' records, after this worker has left a step unfinished."""
    for name in _LOGGERS:
        module = sys.modules.get(name)
        if (logger := getattr(module, "_LOGGER", None)) is not None:
            for remove in _REMOVERS:
                getattr(logger, remove, lambda: None)()
            vars(module)["_LOGGER"] = None
    traces = sys.modules.get(_TRACES)
    if (tracer := getattr(traces, "_MOE_ROUTER_TRACER", None)) is not None:
        # Discard the tracer.  train() creates a new one, because this worker's next place may have other files.
        atexit.unregister(tracer.flush)
        tracer.remove_hooks()
        tracer.records.clear()
        tracer._router_state.clear()
        with suppress(OSError):  # for example, the disk is full
            tracer.flush()
        vars(traces)["_MOE_ROUTER_TRACER"] = None


def of_parameters() -> bool:
    """Return whether Megatron writes the model's parameters at the end of the current iteration."""
    args = get_args()
    every = getattr(args, "save_params_interval", None)
    return every is not None and (args.curr_iteration + 1) % every == 0
