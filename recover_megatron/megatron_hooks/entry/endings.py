"""How Megatron's pretrain() ends: whether the training is over, or this worker alone has ended before."""

from __future__ import annotations

import inspect
import traceback

from recover_megatron.integrate import Loop

HANDLERS = {"_graceful_shutdown", "check_adlr_autoresume_termination", "setup_model_and_optimizer"}
"""Functions of ``megatron.training`` that end a process because they were asked to."""

NO_DATA = "Megatron has trained nothing, for it was given no data to train with (its data sets, --split)"


class EndedEarly(Exception):
    """This worker's Megatron has ended before the training was over, and says that all is well."""


def check_exit_was_asked_for(exit_: SystemExit, loop: Loop) -> None:
    """Raise ``EndedEarly`` unless the training is over: the function that called sys.exit() tells what it means.

    train() calls it                     over: --exit-interval, --exit-duration-in-mins or the exit signal asked for it
    a handler of Megatron's calls it     over: a signal or the scheduler asked for it
    it calls exit() where it is set up   over: it has converted a checkpoint (--ckpt-convert-format), and was to do no
                                         more
    anything else calls it               not over: a checkpoint that is not there or not whole, or the user's own code

    (pretrain() that returns without train() is not over either: there was no data.)
    """
    found = list(traceback.walk_tb(exit_.__traceback__))
    if len(found) > 1 and found[-1][0].f_globals.get("__name__") == "_sitebuiltins":
        found.pop()  # exit(), which is a function itself
    frame, line = found[-1]
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    if code in (inspect.unwrap(getattr(seam.owner(), seam.name)).__code__ for seam in loop.seams["train"]):
        return
    if code.co_name in HANDLERS and module.startswith("megatron.training."):
        return
    words = {name: frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]}
    given = ", ".join(f"{name}={word!r}" for name, word in words.items() if isinstance(word, str))
    raise EndedEarly(
        f"sys.exit() was called before the end of the training, by {code.co_name}({given}), {module} line {line}"
    ) from exit_
