"""Shadows in host memory (--recover-shadow-device cpu): updated by a thread, while the next step computes.

    begin    the finished sums are copied to the host, and the settings of the update that is about to be made
    run      a thread clips them by the same norm and makes the same update, with the inner optimizer's own step()
    join     before anybody reads a shadow, or updates it again

A shadow is needed when its owner has died, when state changes hands, and when states are compared; not before.  So the
training waits for the host only if the host takes longer for its shadows than the device for a step.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from recover_megatron.megatron_hooks.pieces import Piece, Pieces


class HostShadows:
    """Updates them.  ``pieces``: of each of Megatron's distributed optimizers; ``clip``: its --clip-grad."""

    def __init__(self, pieces: Sequence[Pieces], clip: float) -> None:
        self._pieces = pieces
        self._clip = clip
        self._thread: threading.Thread | None = None
        self._failed: list[BaseException] = []

    def begin(self, norm: float) -> None:
        """An update with the gradients as they are now, of norm ``norm``; before the device's own one."""
        self.join()
        work = [(pieces, shadows, _settings(pieces)) for pieces in self._pieces if (shadows := list(pieces.aside))]
        if not work:
            return
        for _, shadows, _ in work:
            for piece in shadows:
                # A copy in any case: the buffer is cleared when the next iteration begins.
                piece.tensor.grad = piece.gradient.to(piece.tensor.device, torch.float32, copy=True)
        # As Megatron clips: by float32 numbers, and only what is too long.
        factor = self._clip / (norm + 1.0e-6) if self._clip > 0 else 1.0

        def run() -> None:
            try:
                for pieces, shadows, settings in work:
                    _update(pieces.inner, shadows, settings, factor)
            except BaseException as error:  # noqa: BLE001  the thread's boundary: this worker's own fault, raised by join
                self._failed.append(error)

        self._thread = threading.Thread(target=run, name="recover-host-shadows", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return when the shadows are those of the last update.  Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()


def _settings(pieces: Pieces) -> list[dict[str, Any]]:
    """Of each group, as they are before this update: learning rate, decay, steps made so far where a group has them."""
    return [{key: value for key, value in group.items() if key != "params"} for group in pieces.inner.param_groups]


def _update(inner: Any, shadows: Sequence[Piece], settings: Sequence[dict[str, Any]], factor: float) -> None:
    """What the device's ``inner`` optimizer does to its own pieces, by another one of its kind, with these alone."""
    if factor < 1.0:
        for piece in shadows:
            assert piece.tensor.grad is not None
            piece.tensor.grad.mul_(factor)
    twin = object.__new__(type(inner))
    twin.__dict__.update(inner.__dict__)
    twin.param_groups = [
        {**group, "params": [piece.tensor for piece in shadows if piece.group == number]}
        for number, group in enumerate(settings)
    ]
    twin.state = defaultdict(dict, {piece.tensor: piece.state for piece in shadows})
    type(inner).step(twin)  # not what somebody may have put in its place on ``inner`` alone
    for piece in shadows:
        piece.tensor.grad = None
        piece.state = twin.state[piece.tensor]
