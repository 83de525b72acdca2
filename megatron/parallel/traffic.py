"""Communication in progress, and counters of what a rank issues and sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

import torch
import torch.distributed as dist


class Waitable(Protocol):
    """A communication in progress."""

    def wait(self) -> object:
        """Block until it is complete; on a GPU, block the current stream only."""
        ...


class Messages:
    """The sends and receives in progress of one exchange between ranks."""

    def __init__(self, pending: Sequence[dist.Work | None]) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Block until all are complete; what was sent may then be modified."""
        for work in self._pending:
            assert work is not None, "the rank is in the group"
            work.wait()


class Calls:
    """A counter of the collectives and messages that this rank issues over one set of connections.

    gloo pairs the n-th collective of one rank with the n-th of another, whatever they are. `tell`,
    if set, is called with the number and the description of each collective or message and with
    `name`, which is equal on all ranks of the connections, so that desynchronised ranks are found.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.count = 0
        self.tell: Callable[[int, str, str], None] | None = None

    def note(self, what: str, tensor: torch.Tensor) -> None:
        """Count a collective or message that is about to be issued, and report it to `tell`."""
        self.count += 1
        if self.tell is not None:
            text = f"{what} of {tensor.numel()} {last_part(tensor.dtype)}"
            self.tell(self.count, text, self.name)


class Traffic:
    """A counter of the bytes that this rank sends along one axis.

    The bytes of a collective are those of a ring algorithm, whatever algorithm the backend chose.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._lock = Lock()  # A wire counts in its own thread.

    def add(self, sent: int) -> None:
        """Count bytes that are about to be sent."""
        with self._lock:
            self._sent += sent

    def take(self) -> int:
        """Return the bytes since the last call, and start again from 0."""
        with self._lock:
            sent, self._sent = self._sent, 0
        return sent


def last_part(name: object) -> str:
    """Return the name of a torch constant without its module and class."""
    return str(name).rpartition(".")[2]
