"""Check, after the end of Megatron's pretrain(), that the training is over: a worker may have exited early."""

from __future__ import annotations

import inspect
import traceback

from recover_megatron.integrate import Loop

HANDLERS = {"_graceful_shutdown", "check_adlr_autoresume_termination", "setup_model_and_optimizer"}
"""Functions of ``megatron.training`` that call sys.exit() because a signal, the scheduler or a flag requested it."""

NO_DATA = "Megatron has trained nothing: its training data set is empty (check the data sets and --split)"


class EndedEarly(Exception):
    """Megatron has exited with status 0 on this worker before the training was over."""


def check_exit_was_asked_for(exit_: SystemExit, loop: Loop) -> None:
    """Raise ``EndedEarly`` unless the training is over, judged by the function that called sys.exit().

    train()                              over: --exit-interval, --exit-duration-in-mins or a signal requested the exit
    a handler of Megatron                over: a signal or the scheduler requested the exit
    setup_model_and_optimizer()          over: the program has only converted a checkpoint (--ckpt-convert-format)
    any other function                   not over: a checkpoint is missing or incomplete, or the user's code exited
    """
    found = list(traceback.walk_tb(exit_.__traceback__))
    if len(found) > 1 and found[-1][0].f_globals.get("__name__") == "_sitebuiltins":
        found.pop()  # the frame of Python's exit()
    frame, line = found[-1]
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    if code in (inspect.unwrap(getattr(seam.owner(), seam.name)).__code__ for seam in loop.seams["train"]):
        return
    if code.co_name in HANDLERS and module.startswith("megatron.training."):
        return
    arguments = {name: frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]}
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if isinstance(value, str))
    raise EndedEarly(
        f"sys.exit() was called before the end of the training, by {code.co_name}({given}), {module} line {line}"
    ) from exit_
