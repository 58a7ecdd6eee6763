"""What Megatron computes from all parameters between two steps, over replicas: a section each.

check_param_hashes_across_dp_replicas()   --check-weight-hash-across-dp-replicas-interval: among those who have a place
calc_params_l2_norm()                     --log-params-norm: with the distributed optimizer each worker adds up the
                                          main parameters for which it speaks, owned or as a shadow of somebody lost

Run again from the start by whoever is left when a worker is lost, so that neither waits for the dead nor leaves out
what they held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from recover_megatron.instep.traffic import Mode
from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer


class OverParameters:
    """Of one worker."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.sharded: ShardedOptimizer | None = None
        """The distributed optimizer, where there is one."""

    def install(self, loop: Loop) -> None:
        """Wrap the seams; raises UserError if the loop's are not the ones we know."""
        loop.wrap("weight_hashes", self._hashes)
        loop.wrap("parameters_norm", self._norm)

    def _hashes(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def check_param_hashes_across_dp_replicas(model: list[Any], cross_check: bool = False) -> bool:
            if self._groups.traffic.mode is Mode.ALONE:
                return True  # on its way to a place, with a state whose digest was checked; the others are in a step
            return bool(self._section("weight hashes", lambda: original(model, cross_check)))

        return check_param_hashes_across_dp_replicas

    def _norm(self, original: Callable[..., float]) -> Callable[..., float]:
        def calc_params_l2_norm(model: Any, *args: Any, **kwargs: Any) -> float:
            def run() -> float:
                parts = {} if self.sharded is None else spoken_for(self.sharded)
                with main_parameters(parts):
                    return original(model, *args, **kwargs)

            return float(self._section("parameters' norm", run))

        return calc_params_l2_norm

    def _section(self, kind: str, run: Callable[[], Any]) -> Any:
        recovery = self._groups.recovery
        if recovery is None or self._groups.traffic.mode is not Mode.OPEN:
            return run()

        def inside() -> Any:
            recovery.progress.mark(kind, waiting=True)
            with self._groups.in_section():
                return run()

        return recovery.sections.run(kind, inside)


def spoken_for(sharded: ShardedOptimizer) -> dict[torch.nn.Parameter, list[torch.Tensor]]:
    """Of every 16-bit parameter, the parts of its copy in 32 bits for which this worker speaks, ascending."""
    found: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
    for held, primary in sharded.primaries():
        found.update({parameter: [] for parameter in held.parameters if parameter.dtype != torch.float32})
        for fragment in sorted(primary, key=lambda its: (its.bucket, its.start)):
            if (parts := found.get(held.parameter_of(fragment))) is not None:
                parts.append(fragment.tensor.detach())
    return found


@contextmanager
def main_parameters(parts: Mapping[torch.nn.Parameter, list[torch.Tensor]]) -> Iterator[None]:
    """Let each parameter's ``main_param``, this worker's shard to Megatron, be these parts of it, none for no part.

    Megatron sets it when the optimizer is made; who holds what changes with every loss.
    """
    names = ("main_param", "main_param_sharded")
    before = {its: [(name, getattr(its, name)) for name in names if hasattr(its, name)] for its in parts}
    try:
        for its, held in parts.items():
            its.main_param = torch.cat([part.to(its.device).view(-1) for part in held]) if held else None
            its.main_param_sharded = True
        yield
    finally:
        for its, attributes in before.items():
            for name in names:
                vars(its).pop(name, None)
            vars(its).update(attributes)
