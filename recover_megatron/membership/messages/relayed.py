"""Messages between workers and the relay of their node (``io.relay``), and between a relay and a coordinator.

A relay carries the connections of its node's workers, the *channels*, over one connection to each coordinator. ``From``
and ``To`` precede a frame of a channel, which the relay passes on unchanged: the worker and the coordinator prove the
secret to each other as without a relay.

    worker -- Dial(candidate) ---------> relay -- Relay, then Opened, From, Beats, Closed, WasRead --> coordinator
    worker <------ Relaying, Unreached-- relay <----------------------------- To, Answers, Close, Read -- coordinator
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from recover_megatron.membership.messages import fields as f
from recover_megatron.membership.messages.to_coordinator import Heartbeat

MOST_CHANNELS = 4096
"""Maximum number of open channels of a relay, and of channels in one message."""
Channel = Annotated[int, Meta(ge=0, le=1 << 53)]


class Dial(f.Message, frozen=True):
    """A worker's first message: the candidate to which its relay must connect it."""

    address: f.Address


class Relaying(f.Message, frozen=True):
    """The relay runs: sent at once, and then every ``relay.ALIVE_SECONDS``.

    ``reached``: the candidate's host has accepted the connection.
    """

    reached: bool


class Unreached(f.Message, frozen=True):
    """The relay's last message: the candidate was not reached, or has closed the connection.

    ``refused``: the candidate's host refuses connections.
    """

    reason: f.Text
    refused: bool = False


class Relay(f.Message, frozen=True):
    """First message of a relay to a coordinator."""


class Opened(f.Message, frozen=True):
    """A worker has connected."""

    channel: Channel


class From(f.Message, frozen=True):
    """The next frame comes from this channel."""

    channel: Channel


class Beats(f.Message, frozen=True):
    """Heartbeats of several channels."""

    beats: Annotated[list[tuple[Channel, Heartbeat]], Meta(max_length=MOST_CHANNELS)]


class Closed(f.Message, frozen=True):
    """A channel is closed. ``ended``: the worker closed it, or the kernel did because the worker has ended."""

    channel: Channel
    ended: bool
    reason: f.Text


class WasRead(f.Message, frozen=True):
    """Answer to ``Read``: all frames that had arrived have been passed on."""

    channel: Channel


class To(f.Message, frozen=True):
    """The next frame is for these channels."""

    channels: Annotated[list[Channel], Meta(min_length=1, max_length=MOST_CHANNELS)]


class Answers(f.Message, frozen=True):
    """Numbers of the last heartbeats that have arrived from some channels; each worker gets a ``Beat``."""

    answers: Annotated[list[tuple[Channel, f.Number]], Meta(max_length=MOST_CHANNELS)]


class Close(f.Message, frozen=True):
    """The coordinator closes a channel."""

    channel: Channel


class Read(f.Message, frozen=True):
    """The relay must now pass on all frames that have arrived from a channel."""

    channel: Channel


ToWorker = Relaying | Unreached
FromRelay = Opened | From | Beats | Closed | WasRead
ToRelay = To | Answers | Close | Read
