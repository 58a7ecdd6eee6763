"""What a worker's part of the training is made of, between two iterations: to give to another, to take over, to check.

    tree()      parameters, the optimizer's masters and moments: equal in a column; and this worker's own: buffers,
                scales of 8-bit numbers, the learning rate and its schedule, Megatron's counters, what its log has added
                up
    room()      where the tensors of somebody's tree are to be received: mostly those that this worker has
    load(tree)  become that; the worker then begins the iteration that follows
    digest()    64 bits of the parameters, the optimizer's tensors and what steers the update: equal in a column

The optimizer is read and written through torch's interface (``param_groups``, ``state``), which all of Megatron's plain
optimizers and their apex and Transformer Engine kin have.  A worker that has made no step has no moments yet; they are
made as they arrive.  A distributed optimizer's state is not a column's: who holds which part of it is told, no more,
and the parts change hands by `sharded_optimizer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.utils import get_model_config
from megatron.training import get_args, get_timers

from recover_megatron.collectives.state.transport import digest
from recover_megatron.collectives.state.trees import Path, Place, at, flatten, in_place, new_memory
from recover_megatron.errors import Disagreement
from recover_megatron.megatron_hooks.fsdp.state import is_fsdp, local, tidy, weights
from recover_megatron.megatron_hooks.gradients.maxima import Scales
from recover_megatron.megatron_hooks.gradients.microbatches import to_skip, with_skipped
from recover_megatron.megatron_hooks.layout import no_way_back
from recover_megatron.megatron_hooks.logging import dumps
from recover_megatron.megatron_hooks.logging.trackers import LogTotals, biases
from recover_megatron.megatron_hooks.loop.loop_counters import LoopCounters
from recover_megatron.megatron_hooks.optimizer import precision
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer, groups_with_parameters


class TrainingState:
    """One worker's part of the training's state.  ``validation``: Megatron's iterators, as train() gets them.

    ``operations``, ``running``: see ``LoopCounters``.  ``blank``: the model was built alone; its parameters are those
    of no iteration.
    """

    def __init__(
        self,
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        validation: Any,
        operations: Callable[[int], float],
        *,
        running: Callable[[float], float] = float,
        blank: bool = False,
        sharded: ShardedOptimizer | None = None,
        scales: Scales,
    ) -> None:
        self._sharded = sharded
        self._scales = scales
        self._loop = LoopCounters(scheduler, validation, operations, running)
        self.agree_on_start = self._loop.agree_on_start
        self._model = model
        self._optimizer = optimizer
        self._optimizers = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        args = get_args()
        self.version: int | None = None if blank else args.iteration
        """Iterations that the parameters have seen; None: they are of no use."""
        all_of_it = not blank and args.load is not None and not (args.finetune or args.no_load_optim)
        self.loaded_at_launch = int(args.iteration) if all_of_it else 0
        """The iteration of the checkpoint with which the run began; 0: none, a part of one, or before this worker."""
        self.no_way_back = no_way_back(args, self._optimizers)
        """Why the run cannot go back to a checkpoint in place; empty: it can."""
        self.timeline = 0
        """The epoch of the timeline that this state is of (``instep.decision.Timeline``)."""
        self.last_step = (0, 0)
        """The iteration of the last step that was begun from this state, and which decision it is; (0, 0): none was."""
        self.counters = self._loop.read(self.version)
        """The counters when the last iteration began."""
        self.totals = LogTotals()
        self._scalers: list[Any] = []
        """What the loss scales were then."""
        self._plain_groups: list[Any] = []
        """What the plain values of the optimizers' groups were then."""
        self._biases: list[torch.Tensor] = []
        """What the biases of the routers were then."""
        self._skipped = False
        """Whether the step after which the version counts was skipped, for the sake of its loss scale."""

    @property
    def first(self) -> int:
        """The iteration with which the run began, whenever this worker came into it."""
        return self._loop.first

    @property
    def gone_back(self) -> bool:
        """Whether it has begun with that for another time, from a checkpoint that was loaded in place."""
        return self._loop.gone_back

    # ---- between iterations

    def begin(self) -> None:
        """An iteration begins: remember the counters that go with the parameters as they are."""
        self.version = get_args().curr_iteration
        self._loop.show_launch()
        self.counters = self._loop.read(self.version)
        self._remember()

    def stepped(self, updated: bool) -> None:
        """The optimizer has made the step of the iteration under way; ``updated``: not skipped it."""
        self.version = with_skipped(get_args().curr_iteration + 1, to_skip())
        self._skipped = not updated

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that a column has in common, in one order."""
        for chunk in self._model:
            yield from weights(chunk)
        for one in self._optimizers if self._sharded is None else ():
            for parameter in _parameters(one):
                yield local(parameter.data)
                own = one.optimizer.state.get(parameter, {})
                yield from (local(own[name]) for name in sorted(own) if isinstance(own[name], torch.Tensor))
        yield from self._scales.tensors()

    def digest(self) -> str:
        text = torch.frombuffer(bytearray(self.steering().encode()), dtype=torch.uint8)
        return f"{digest(chain(self.tensors(), [text])) % (1 << 64):016x}"

    def steering(self) -> str:
        """What steers the update: the schedule; of the parameter groups the learning rate, betas, steps made, ..."""
        groups = [[_steering(group, self._sharded is None) for group in self._groups(one)] for one in self._optimizers]
        return json.dumps([self._loop.schedule_state(), groups], sort_keys=True)

    def tree(self) -> dict[str, Any]:
        """See ``collectives.state.holder``; its tensors are the living ones."""
        return {
            "column": self._column(),
            "own": {
                # Copies: a forward pass may count something in them while they are sent.
                "buffers": [[buffer.clone() for buffer in chunk.module.buffers()] for chunk in self._model],
                "scales": [tensor.clone() for tensor in self._scales.tensors(whole=True)],
                "optimizers": [
                    {"groups": plain_groups(self._groups(one)), "scaler": _scaler(one)} for one in self._optimizers
                ],
                "shards": None if self._sharded is None else self._sharded.shards.to_json(),
                "counters": self._loop.read(self.version),
                "log": self.totals.tree(),
                "steering": self.steering(),
            },
        }

    def _column(self) -> dict[str, Any]:
        """What all workers of a column have equal between two iterations."""
        parameters = [weights(chunk) for chunk in self._model]
        model = {parameter.data_ptr() for its in parameters for parameter in its}
        whole = self._optimizers if self._sharded is None else []
        return {"parameters": parameters, "optimizers": [_optimizer_tree(one, model) for one in whole]}

    def _groups(self, one: Any) -> list[dict[str, Any]]:
        return _groups(one) if self._sharded is None else groups_with_parameters(one)

    def make_room(self) -> None:
        """Have the moments that an optimizer without a step has not made yet, in memory that is in use.

        For a worker that waits: new memory takes longer to get than to fill.  What is in them is of no use.
        """
        for one in self._optimizers if self._sharded is None else ():
            make = getattr(one, "init_state_fn", None)
            if make is not None and not one.optimizer.state:
                if one.config.use_precision_aware_optimizer:
                    continue  # Megatron 0.19.2 calls Transformer Engine's without its second parameter: a TypeError
                make(one.optimizer, one.config)
                for own in one.optimizer.state.values():
                    for value in own.values():
                        if isinstance(value, torch.Tensor):
                            value.zero_()  # zeros that were asked for are no memory before they are written

    def without_moments(self) -> Iterator[torch.Tensor]:
        """Yield what is updated by optimizers that have not made a step: their moments are still to come."""
        for one in self._optimizers if self._sharded is None else ():
            yield from (local(parameter.data) for parameter in _parameters(one) if not one.optimizer.state)

    def room(self, version: int | None) -> Place:
        """Where to receive a state of ``version``: the living tensors, unless this worker's own state is of use.

        That of the same version may be, should the others be lost meanwhile: it is kept until the other one is there.
        Otherwise this worker has no state any more until it has loaded the one that comes.
        """
        if self.version is not None and self.version == version:
            return new_memory
        self.version = None
        living = {"column": self._column()}

        def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return in_place(at(living, path), path, shape, dtype)

        return place

    def room_aside(self, before: Any) -> Place:
        """Where to receive a state that may never be whole: the tensors of ``before``, which was loaded, once more."""
        living = {"column": self._column()}

        def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            used, own = at(before, path), at(living, path)
            return in_place(None if _same_memory(used, own) else used, path, shape, dtype)

        return place

    def load(self, tree: dict[str, Any]) -> None:
        """Become what ``tree`` says.  Raises Disagreement if it is of another model."""
        column, own = tree["column"], tree["own"]
        for chunk, parameters, buffers in zip(self._model, column["parameters"], own["buffers"], strict=True):
            _copy(weights(chunk), parameters)
            _copy(list(chunk.module.buffers()), buffers)
        _copy(list(self._scales.tensors(whole=True)), own["scales"])
        for one, its in zip(self._optimizers, own["optimizers"], strict=True):
            _load_scaler(one, its["scaler"])
        if self._sharded is None:
            model = {weight.data_ptr() for chunk in self._model for weight in weights(chunk)}
            for one, its in zip(self._optimizers, column["optimizers"], strict=True):
                _load_optimizer(one, its, model)
        elif not self._sharded.shards.known:
            self._sharded.shards.from_json(own["shards"])
        self._restore(own["counters"], [its["groups"] for its in own["optimizers"]])
        self.totals.load(own["log"])
        if (mine := self.steering()) != (its := own["steering"]):
            raise Disagreement(
                f"with the state that arrived the optimizer steps by {mine}, where it came from by {its}"
            )

    def settle(self) -> None:
        """Have the schedule that goes with the parameters: the loop may have been left between the two steps."""
        if self._done:
            self._loop.schedule(self.counters, int(not self._skipped))

    def resume(self) -> None:
        """Begin from the state that this worker has: after the iteration under way, or before it if it made no step."""
        assert self.version is not None
        done, groups = self._done, self._plain_groups
        if not done:  # Megatron changes a loss scale before it clips, where a step may have ended
            for one, scaler in zip(self._optimizers, self._scalers, strict=True):
                _load_scaler(one, scaler)
            _copy(biases(self._model), self._biases)  # they are moved before that, too
        self._restore(self.counters, None if done else groups, iterations=int(done))

    @property
    def _done(self) -> bool:
        """Whether this worker has made the step of the iteration under way."""
        return self.version is not None and self.version > self.counters["version"]

    def _restore(self, counters: dict[str, Any], groups: Any, *, iterations: int = 0) -> None:
        """Set Megatron's counters to those of ``counters``, ``iterations`` later (0 or 1): the loop begins there.

        ``groups``: the plain values of all optimizers' groups; None: the schedule says what changes of them.
        """
        self.version = self._loop.restore(counters, iterations=iterations, skipped=self._skipped)
        for one, its in zip(self._optimizers, groups or (), strict=groups is not None):
            load_groups(self._groups(one), its)
        self.last_step = 0, 0
        self.counters = self._loop.read(self.version)
        self._remember()

    # ---- back to a checkpoint

    def go_back(self, iteration: int) -> None:
        """The run goes back to after ``iteration``: this worker has no state until it has loaded that one.

        Megatron's counters are those of a worker that has not begun, as its load functions want them.
        """
        self.version = None
        self.last_step = 0, 0
        self._scales.reset()  # a checkpoint may have none
        self._loop.go_back(iteration)

    def loaded(self, iteration: int, operations: int, timeline: int) -> None:
        """Megatron has loaded a checkpoint of ``iteration``: as at a start from it, whoever was there before.

        ``operations``: in floating point, as the checkpoint has counted them.  What the log had added up is not in a
        checkpoint: its next row is that of the iterations from here on.
        """
        self.version = iteration
        self._loop.loaded(iteration, operations)
        self._skipped = False
        self.timeline = timeline
        self.totals.load({"totals": {}, "names": self.totals.names, "seconds": 0.0, "cumulative": {}})
        self.counters = self._loop.read(self.version)
        self._remember()

    def _remember(self) -> None:
        """What changes before the optimizer makes its step."""
        self._scalers = [_scaler(one) for one in self._optimizers]
        self._plain_groups = [plain_groups(self._groups(one)) for one in self._optimizers]
        self._biases = [bias.clone() for bias in biases(self._model)]

    def tidy(self) -> None:
        """What an exception in the middle of the training left: train() is to be entered again."""
        config = get_model_config(self._model[0])
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
        for chunk in self._model:
            if is_fsdp(chunk):
                tidy(chunk)
                continue
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                group.is_last_microbatch = True
            # train() takes them away for its first iteration, an evaluation and a checkpoint for as long as they last.
            if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()
        for one in [self._optimizer, *self._optimizers]:
            # It asks the replica once and remembers: workers that come together must all have asked, or none.
            one._has_grad_norm_group_cache = None
            # What the one of Megatron-FSDP 2 has cast for a step that was not made: the gradients are new ones then.
            getattr(one, "_casted_grads", []).clear()
        dumps.leave()
        get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET
        self.totals.pause()
        for timer in get_timers()._timers.values():
            timer._started = False
            timer.reset()


def _groups(one: Any) -> list[dict[str, Any]]:
    """The parameter groups that have any: empty ones are there for the sake of other positions."""
    return [group for group in one.optimizer.param_groups if group["params"]]


def _parameters(one: Any) -> Iterator[torch.Tensor]:
    """What the inner optimizer updates: the model's parameters, or their copies in higher precision."""
    for group in _groups(one):
        yield from group["params"]


def plain_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of an optimizer's groups is sent: their plain values."""
    return [{key: value for key, value in group.items() if _is_plain(key, value)} for group in groups]


def load_groups(own: Sequence[dict[str, Any]], its: Sequence[dict[str, Any]]) -> None:
    """Become what ``plain_groups`` gave; what there was not then, a count of steps before the first one, is gone."""
    for group, values in zip(own, its, strict=True):
        for key in [key for key, value in group.items() if _is_plain(key, value) and key not in values]:
            del group[key]
        # The betas are a tuple, which has become a list on its way.
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _is_plain(key: str, value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(key, each) for each in value)
    return key != "params" and isinstance(value, (bool, int, float, str, type(None)))


def _steering(group: dict[str, Any], whole: bool) -> dict[str, Any]:
    """The values of a group, those that are kept in a tensor, too.

    Not ``whole``: spread over a column, where somebody without parameters of it counts no steps.
    """
    values = {key: value.item() for key, value in group.items() if isinstance(value, torch.Tensor) and not value.dim()}
    values |= plain_groups([group])[0]
    return values if whole else {key: value for key, value in values.items() if key != "step"}


def _masters(one: Any, model: set[int]) -> list[torch.Tensor]:
    """What the inner optimizer updates and is not the model's own memory, which begins at ``model``."""
    every = (local(parameter.data) for parameter in _parameters(one))
    return [master for master in every if master.data_ptr() not in model]


def _optimizer_tree(one: Any, model: set[int]) -> dict[str, Any]:
    state = one.optimizer.state
    return {
        "masters": _masters(one, model),
        "state": [
            {name: local(value) for name, value in state.get(parameter, {}).items()} for parameter in _parameters(one)
        ],
    }


def _scaler(one: Any) -> Any:
    return one.grad_scaler.state_dict() if getattr(one, "grad_scaler", None) else None


def _load_scaler(one: Any, state: Any) -> None:
    if state is not None:
        one.grad_scaler.load_state_dict(state)


def _load_optimizer(one: Any, its: dict[str, Any], model: set[int]) -> None:
    inner = one.optimizer
    _copy(_masters(one, model), its["masters"])
    for parameter, values in zip(_parameters(one), its["state"], strict=True):
        own = inner.state[parameter]
        for key in [key for key in own if key not in values]:
            del own[key]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and key not in own:
                own[key] = torch.zeros_like(parameter.data, dtype=value.dtype)
            if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
                _copy([local(own[key])], [value])
            else:
                own[key] = value
    precision.set_scales(inner, inner.state.items())


def _copy(own: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    if [tensor.shape for tensor in own] != [tensor.shape for tensor in given]:
        raise Disagreement("the state that arrived is of a model with other shapes")
    with torch.no_grad():
        for mine, its in zip(own, given, strict=True):
            if not _same_memory(mine, its):  # else it was received where it belongs
                mine.copy_(its)


def _same_memory(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and bool(one.data_ptr() == other.data_ptr())


def shared_tensors(tree: dict[str, Any]) -> int:
    """How many tensors of a state, the first ones, are equal in all workers of a column."""
    return len(flatten(tree["column"])[1])
