"""What every name of torch refers to, to compare before and after."""

import sys

import torch
import torch.distributed as dist


def snapshot():
    """{dotted name: object} for the members of all loaded modules of torch, of the tensor class and of gloo's group."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            # Lazy modules make members when asked: only what is there counts.
            found |= {f"{name}.{member}": value for member, value in list(vars(module).items())}
    for owner in (torch.Tensor, torch._C.TensorBase):
        found |= {f"torch.Tensor.{m}": getattr(torch.Tensor, m) for m in dir(owner) if not m.startswith("__")}
    gloo = dist.ProcessGroupGloo
    return found | {f"torch.distributed.ProcessGroupGloo.{m}": getattr(gloo, m) for m in vars(gloo)}


def changed(before, after):
    """Names that were there before and now refer to something else."""
    return {name for name, value in before.items() if name in after and not _same(value, after[name])}


def _same(one, other):
    # Bound methods and descriptors are made anew at each access: equal, not identical.
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    return not isinstance(one, (bool, dict, list, set)) and bool(one == other)
