"""Hooks of Megatron-Bridge's training loop, ``megatron.bridge.training`` (docs/integrate.md).

If the signature of a wrapped function differs between Bridge and Megatron-LM, the ``adapt`` of its seam translates the
calls.  ``BridgeArguments`` maps Bridge's configuration and counters to ``megatron.training.get_args()``.
``bridge_arguments.problems`` refuses some settings.

The seams match the releases in ``SUPPORTED``; ``scripts/check_megatron.py`` compares them with Bridge's sources.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.training import global_vars

from recover_megatron.arguments import RecoverConfig, config_from_argv
from recover_megatron.arguments import problems as flag_problems
from recover_megatron.errors import Disagreement, UserError, refuse
from recover_megatron.integrate import Loop, Seam, Wrapper
from recover_megatron.megatron_hooks.entry.fault_tolerance import survive
from recover_megatron.megatron_hooks.loop.bridge_arguments import BridgeArguments, problems

SUPPORTED = "Megatron-Bridge 0.6; its seams are compared with those of 0.6.0 and 0.6.2"

PRETRAIN = "megatron.bridge.training.pretrain"
TRAIN = "megatron.bridge.training.train"
EVAL = "megatron.bridge.training.eval"
SETUP = "megatron.bridge.training.setup"
CHECKPOINTING = "megatron.bridge.training.checkpointing"
LOADERS = "megatron.bridge.data.loaders"
FLOPS = "megatron.bridge.training.utils.flop_utils"
CONFIG = "megatron.bridge.training.config"
INITIALIZE = "megatron.bridge.training.initialize"


def pretrain(config: Any, forward_step_func: Any, callbacks: Any = None, recover: RecoverConfig | None = None) -> None:
    """Call Bridge's ``pretrain`` with the same arguments; with ``--recover`` the run survives deaths.

    ``recover``: the configuration; if None, it is read from the ``--recover-*`` flags of the command line.  If the run
    cannot start, the process prints all reasons and exits with code 2.  If the run ends before its last iteration, the
    process exits with one of the codes in docs/operations.md.
    """
    try:
        recover = config_from_argv(sys.argv[1:]) if recover is None else recover
        if not recover.enabled:
            _function(PRETRAIN, "pretrain")(config, forward_step_func, callbacks)
            return
        BridgeRun(config, forward_step_func, callbacks, recover).survive()
    except UserError as error:
        refuse(sys.argv[0], error.reasons)


class BridgeRun:
    """Run of Bridge's ``pretrain`` on one worker."""

    def __init__(self, config: Any, forward_step_func: Any, callbacks: Any, recover: RecoverConfig) -> None:
        self._call: tuple[Any, ...] = (config, forward_step_func, callbacks)
        self._recover = recover
        self.arguments: Any = BridgeArguments(config)
        self._begun = False
        self._kept: Any = None
        """Unchanged copy of the configuration that the user passed."""
        self._groups: Any = None
        """Collection of process groups that Bridge passed to its loop."""
        self._state: Any = None
        """Bridge's ``GlobalState``."""
        self._consumed: int | None = None
        """Number of samples that Bridge must have counted before the next iteration; None when the loop is entered."""
        self.loop = Loop("Megatron-Bridge", SUPPORTED, self._seams(), self)

    def survive(self) -> None:
        """Run the training to its end.  If it cannot start, raises UserError before process groups are created."""
        self._kept = copy.deepcopy(self._call[0])
        self.loop.check()
        if reasons := [reason for seam in OWN_SEAMS if (reason := seam.misfit())]:
            raise UserError(*(f"--recover: Megatron-Bridge: {reason} ({SUPPORTED})" for reason in reasons))
        updated = copy.deepcopy(self._call[0])
        _function(CONFIG, "runtime_config_update")(updated)
        if reasons := [*flag_problems(self._recover), *problems(updated, self._recover)]:
            raise UserError(*reasons)
        self.arguments.attach(updated, None)
        global_vars._GLOBAL_ARGS = self.arguments
        setup, *ends = OWN_SEAMS
        setup.wrap(self._setup, SUPPORTED)
        for end in ends:
            end.wrap(_left_to_us, SUPPORTED)
        survive(self._recover, self._pretrain, lambda: self.arguments, self.loop)

    def _pretrain(self) -> None:
        self._begun = False
        config, *others = self._call
        # Each call gets a new copy of the configuration, because Bridge changes the configuration.
        self._call = (copy.deepcopy(self._kept), *others)
        _function(PRETRAIN, "pretrain")(config, *others)

    # ---- services for the recovery

    def operations(self, samples: int) -> float:
        return float(_function(FLOPS, "num_floating_point_operations")(self.arguments.config, batch_size=samples))

    def running(self, seconds: float) -> float:
        now = time.time()
        self._state.start_time = min(self._state.start_time, now - seconds)
        return float(now - self._state.start_time)

    def finish_saves(self) -> None:
        """Do nothing, because asynchronous saves are refused (see ``recover_megatron.integrate.Services``)."""

    def forget(self) -> None:
        _function(INITIALIZE, "destroy_global_state")()

    # ---- functions of Bridge whose arguments differ from Megatron-LM's

    def _seams(self) -> Mapping[str, Sequence[Seam]]:
        data = ("train_data_iterator", "valid_data_iterator", "global_state", "checkpoint_manager", "pg_collection")
        return {
            "initialize": [Seam(INITIALIZE, "_initialize_distributed", ("model_config", "dist_config"))],
            "loader": [Seam(LOADERS, "build_pretraining_data_loader", ("dataset", "consumed_samples"))],
            "endless": [Seam(LOADERS, "cyclic_iter", ("iter",))],
            "train": [Seam(PRETRAIN, "train", (*LOOP_PARAMETERS, *data), adapt=_adapting(self._train))],
            "train_step": [Seam(TRAIN, "train_step", STEP_PARAMETERS, adapt=_adapting(self._step))],
            "schedule": [
                Seam(TRAIN, "get_forward_backward_func", adapt=_with_new_ranks),
                Seam(EVAL, "get_forward_backward_func", adapt=self._schedule_of_evaluation),
            ],
            "log": [Seam(TRAIN, "training_log", LOG_PARAMETERS, ("global_state",), _adapting(self._log))],
            "evaluate": [Seam(EVAL, "evaluate", EVAL_PARAMETERS, adapt=_without_state)],
            "save": [Seam(CHECKPOINTING, "save_checkpoint", ("state", "model", "optimizer"), adapt=_with_iteration)],
            "checkpoint_folder": [Seam(CHECKPOINTING, "get_checkpoint_name", FOLDER_PARAMETERS, adapt=_without_parts)],
            "written": [
                Seam(CHECKPOINTING, "get_checkpoint_train_state_filename", ("checkpoints_path",)),
                Seam(CHECKPOINTING, "get_checkpoint_run_config_filename", ("checkpoints_path",)),
                Seam(CHECKPOINTING, "save_tokenizer_assets", TOKENIZER_PARAMETERS, adapt=_third_first),
            ],
            "saved": [
                Seam(f"megatron.bridge.training.utils.{tracker}_utils", "on_save_checkpoint_success", SAVED_PARAMETERS)
                for tracker in ("wandb", "mlflow", "comet")
            ],
            "load": [Seam(CHECKPOINTING, "load_checkpoint", ("state", "model", "optimizer"))],
            "loaders": [Seam(LOADERS, "build_train_valid_test_data_loaders", ("cfg", "train_state"))],
            "progress_log": [Seam(SETUP, "append_to_progress_log")],
            "weight_hashes": [Seam(TRAIN, "check_param_hashes_across_dp_replicas", ("model", "cross_check"))],
            "parameters_norm": [Seam(TRAIN, "calc_params_l2_norm", ("model", "model_config"))],
        }

    def _setup(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Bridge's ``setup`` to read the run's configuration and counters from its ``GlobalState``."""

        def setup(state: Any, *args: Any, **kwargs: Any) -> Any:
            self._state = state
            self.arguments.attach(state.cfg, state.train_state)
            global_vars._GLOBAL_ARGS, global_vars._GLOBAL_TIMERS = self.arguments, state.timers
            result = original(state, *args, **kwargs)
            self.arguments.attach(state.cfg, state.train_state)  # loading a checkpoint replaces both objects
            return result

        return setup

    def _train(self, wrapper: Wrapper, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def enter(*args: Any, **kwargs: Any) -> Any:
            self.arguments.entered()
            self._consumed = None
            call = inspect.signature(original).bind(*args, **kwargs)
            self._groups = call.arguments["pg_collection"]
            # When its loop starts, Bridge reads the number of replicas, from which it computes the number of samples.
            # If the loop starts again after a loss, Bridge must still read the launch's number of replicas.
            if self._groups.dp.size() != (launched := self.arguments.data_parallel_size):
                call.arguments["pg_collection"] = as_launched = copy.copy(self._groups)
                as_launched.dp = _AsLaunched(self._groups.dp, launched)
            return original(*call.args, **call.kwargs)

        if not self._begun:
            self._begun = True
            self.arguments.loaded()
        return wrapper(enter)(*args, **kwargs)

    def _step(self, wrapper: Wrapper, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._count()
        call = inspect.signature(original).bind(*args, **kwargs)
        call.arguments["pg_collection"] = self._groups
        result = wrapper(original)(*call.args, **call.kwargs)
        state = call.arguments["global_state"]
        if not getattr(state, "_flops_requires_global_reduce", False):
            # Bridge's sums cover only the microbatches of this worker.  If the sums are 0, Bridge counts the operations
            # of the complete batch instead.
            state._flops_seqlen_sum = state._flops_seqlen_sq_sum = 0
        return result

    def _count(self) -> None:
        """Count an iteration.  Raises Disagreement if Bridge's sample count did not advance by one batch.

        Without this check, workers could read data from different positions after an error in this count.
        """
        self.arguments.curr_iteration = self.arguments.step
        consumed = self.arguments.consumed_train_samples
        if self._consumed not in (None, consumed):
            raise Disagreement(f"Bridge reports {consumed} consumed samples; expected {self._consumed}")
        self._consumed = consumed + get_current_running_global_batch_size()

    def _log(
        self, wrapper: Wrapper, original: Callable[..., Any], losses: Any, totals: Any, rate: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        def as_role(losses: Any, totals: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
            return original(losses, totals, rate, *args, **kwargs)

        if "pg_collection" in kwargs:
            kwargs["pg_collection"] = self._groups
        return wrapper(as_role)(losses, totals, rate, self.arguments.step, *args, **kwargs)

    def _schedule_of_evaluation(self, wrapper: Wrapper) -> Wrapper:
        """Adapt ``wrapper`` so that each evaluation step has as many microbatches per replica as at launch.

        Bridge itself would divide the evaluation's batch by the number of live replicas.
        """

        def adapted(original: Callable[..., Any]) -> Callable[..., Any]:
            inner = _with_new_ranks(wrapper)(original)

            def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
                schedule = inner(*args, **kwargs)

                def forward_backward_func(**call: Any) -> Any:
                    config = self.arguments.config
                    of_one = config.validation.eval_micro_batch_size * config.data_parallel_size
                    call["num_microbatches"] = config.validation.eval_global_batch_size // of_one
                    return schedule(**call)

                return forward_backward_func

            return get_forward_backward_func

        return adapted


LOOP_PARAMETERS = ("forward_step_func", "model", "optimizer", "scheduler")
STEP_PARAMETERS = (
    "forward_step_func", "data_iterator", "model", "optimizer", "scheduler", "global_state", "pg_collection",
    "forward_backward_func",
)  # fmt: skip
LOG_PARAMETERS = ("loss_dict", "total_loss_dict", "learning_rate", "decoupled_learning_rate", "loss_scale")
EVAL_PARAMETERS = ("state", "forward_step_func", "data_iterator", "model")
FOLDER_PARAMETERS = ("checkpoints_path", "iteration", "release")
TOKENIZER_PARAMETERS = ("tokenizer", "tokenizer_config", "checkpoint_path")
SAVED_PARAMETERS = ("checkpoint_path", "save_dir", "iteration")

OWN_SEAMS = (
    Seam(PRETRAIN, "setup", ("state",)),
    Seam(PRETRAIN, "_cleanup_after_pretrain_failure", ("state", "should_destroy_process_group")),
    Seam(PRETRAIN, "_maybe_destroy_process_group", ("should_destroy",)),
    Seam(TRAIN, "destroy_global_state"),
)
"""Functions that are wrapped only with Bridge: ``setup``, and functions that destroy process groups or global state."""


def seams() -> list[Seam]:
    """Return the seams of all functions that are wrapped in Bridge."""
    roles = BridgeRun(None, None, None, RecoverConfig()).loop.seams
    return [*OWN_SEAMS, *(seam for role in roles.values() for seam in role)]


class _AsLaunched:
    """A process group whose ``size()`` is the size that the group had at launch."""

    def __init__(self, group: Any, size: int) -> None:
        self._group, self._size = group, size

    def size(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _left_to_us(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a no-op in place of a function that destroys groups or state, which `fault_tolerance` still needs."""

    def left_out(*unused: Any, **unused_too: Any) -> None:
        return None

    return left_out


def _with_new_ranks(wrapper: Wrapper) -> Wrapper:
    """Adapt ``wrapper`` to give each forward-backward pass a new pipeline communicator.

    Bridge creates only one communicator, which stores global ranks.  But global ranks change after a loss.
    """

    def adapted(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_schedule(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = original(*args, **kwargs)

            def forward_backward_func(**call: Any) -> Any:
                if isinstance(once := call.get("p2p_communicator"), P2PCommunicator):
                    call["p2p_communicator"] = P2PCommunicator(pp_group=once.pp_group, config=once.config)
                return schedule(**call)

            return forward_backward_func

        return wrapper(get_schedule)

    return adapted


def _adapting(call: Callable[..., Any]) -> Callable[[Wrapper], Wrapper]:
    """Return an ``adapt`` that replaces each call of ``original(...)`` by ``call(wrapper, original, ...)``."""

    def adapt(wrapper: Wrapper) -> Wrapper:
        return lambda original: partial(call, wrapper, original)

    return adapt


@_adapting
def _without_state(wrapper: Wrapper, original: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Any:
    """Adapt a wrapper of ``f(...)`` to Bridge's ``f(state, ...)``."""
    return wrapper(partial(original, state))(*args, **kwargs)


@_adapting
def _with_iteration(wrapper: Wrapper, original: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Any:
    """Adapt a wrapper of ``f(iteration, ...)`` to Bridge's ``f(state, ...)``."""

    def as_role(iteration: int, *given: Any, **named: Any) -> Any:
        return original(state, *given, **named)

    return wrapper(as_role)(int(state.train_state.step), *args, **kwargs)


@_adapting
def _without_parts(wrapper: Wrapper, original: Callable[..., str], *args: Any, **kwargs: Any) -> Any:
    """Adapt a wrapper of ``f(..., return_base_dir)`` to Bridge's ``f(...)``, which always returns the base folder."""

    def as_role(*given: Any, return_base_dir: bool = True, **named: Any) -> str:
        return original(*given, **named)

    return wrapper(as_role)(*args, **kwargs)


@_adapting
def _third_first(
    wrapper: Wrapper, original: Callable[..., Any], first: Any, second: Any, path: str, *args: Any, **kwargs: Any
) -> Any:
    """Adapt a wrapper of ``f(path)`` to Bridge's ``f(a, b, path)``."""
    return wrapper(lambda final: original(first, second, final, *args, **kwargs))(path)


def _function(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
