"""What a Megatron puts into a checkpoint, and what reading one leaves in a process, by its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KEPT = {
    "args": "CONSUMED and LAUNCH; the rest are flags, which are compared when a worker joins",
    "checkpoint_version": "nothing but reading another checkpoint looks at it",
    "iteration": "counters",
    "num_floating_point_operations_so_far": "counters",
    "model": "parameters, and the worker's own buffers",
    "optimizer": "masters and moments, plain values of the groups, loss scales; or by the sharded optimizer",
    "opt_param_scheduler": "counters",
    "rerun_state_machine": "--recover refuses it",
    "rng_state": "set for each microbatch",
}
"""What there is, and how a newcomer has it."""

SET = {
    "set_checkpoint_version": KEPT["checkpoint_version"],
    "set_loaded_iteration": "Megatron reports the memory after the second iteration from there on",
    "get_rerun_state_machine().load_state_dict": KEPT["rerun_state_machine"],
    "cuda_rng_tracker.set_states": KEPT["rng_state"],
    "np.random.set_state": KEPT["rng_state"],
    "random.setstate": KEPT["rng_state"],
    "torch.cuda.set_rng_state": KEPT["rng_state"],
    "torch.set_rng_state": KEPT["rng_state"],
    "module.load_state_dict": KEPT["model"],
    "opt_param_scheduler.load_state_dict": KEPT["opt_param_scheduler"],
    "optimizer.load_state_dict": KEPT["optimizer"],
    "optimizer.load_state_dict_from_file": KEPT["optimizer"],
    "optimizer.load_parameter_state": KEPT["optimizer"],
    "update_num_microbatches": "by the counters, where they are restored",
}
_READERS = "load_checkpoint", "_load_base_checkpoint", "check_checkpoint_args"
_SETTERS = "set_", "setstate", "load_state_dict", "load_parameter_state", "update_"
_READ = "torch.distributed.checkpoint.load_state_dict"
"""What fills what it is given, and nothing else."""


def kept(megatron: Path) -> set[str]:
    """The keys of a checkpoint.  ``megatron``: the folder of the package."""
    found = {
        node.slice.value if isinstance(node.slice, ast.Constant) else "model"
        for node in _nodes(megatron / "training/checkpointing.py", "generate_state_dict", "save_checkpoint")
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value) == "state_dict"
    }
    return {str(key) for key in found}


def arguments_set(megatron: Path) -> set[str]:
    """Megatron's arguments that reading a checkpoint sets."""
    return {
        node.attr
        for node in _nodes(megatron / "training/checkpointing.py", *_READERS)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "args"
    }


def called(megatron: Path) -> set[str]:
    """What reading a checkpoint calls that sets something."""
    calls = {
        ast.unparse(node.func)
        for node in _nodes(megatron / "training/checkpointing.py", *_READERS)
        if isinstance(node, ast.Call)
    }
    return {call for call in calls if call.rsplit(".", 1)[-1].startswith(_SETTERS)} - {_READ}


def scheduled(megatron: Path) -> dict[str, str]:
    """Key -> what a checkpoint has of the scheduler by that name."""
    (made,) = (
        node
        for node in _nodes(megatron / "core/optimizer_param_scheduler.py", "state_dict")
        if isinstance(node, ast.Dict)
    )
    keys = [key.value for key in made.keys if isinstance(key, ast.Constant)]
    return dict(zip(map(str, keys), map(ast.unparse, made.values), strict=True))


def travels(megatron: Path, arguments: set[str]) -> None:
    """Assert that a newcomer has all of it.  ``arguments``: Megatron's, that it is given."""
    assert kept(megatron) == KEPT.keys()
    assert called(megatron) <= SET.keys()
    others = {
        "ckpt_format",  # 0.18 sets it for ModelOpt, and back
        "override_ckpt_iteration",  # 0.20 sets it with --freeze-all-layers, which is refused
    }
    assert arguments_set(megatron) - others <= arguments
    assert scheduled(megatron) == {key: f"self.{key}" for key in scheduled(megatron)} != {}


def _nodes(path: Path, *names: str) -> Iterator[ast.AST]:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    found = {function.name: function for function in functions if function.name in names}
    assert found.keys() == set(names)
    for function in found.values():
        yield from ast.walk(function)
