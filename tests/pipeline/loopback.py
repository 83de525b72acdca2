"""A pipeline in one process: its ranks are threads, its messages lie in one mailbox."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from megatron.pipeline.schedule import Message

T = TypeVar("T")
SECONDS = 30.0


class Mailbox:
    """What was sent and not yet received; `order` are all messages, as they came in."""

    def __init__(self) -> None:
        self.order: list[Message] = []
        self._tensors: dict[Message, torch.Tensor] = {}
        self._changed = threading.Condition()

    def put(self, message: Message, tensor: torch.Tensor) -> None:
        with self._changed:
            assert message not in self._tensors, f"{message} is sent twice"
            self.order.append(message)
            self._tensors[message] = tensor.clone()
            self._changed.notify_all()

    def take(self, message: Message) -> torch.Tensor:
        with self._changed:
            came = self._changed.wait_for(lambda: message in self._tensors, SECONDS)
            assert came, f"{message} never came"
            return self._tensors.pop(message)

    @property
    def is_empty(self) -> bool:
        return not self._tensors


class Loopback:
    """A `Transport` of one rank through the mailbox that it shares with the others."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._expected: list[Message] = []

    def expect(self, messages: Sequence[Message], *, unanswered: int) -> None:
        assert not self._expected, "the last batch is not over"
        self._expected = list(messages)

    def receive(self, message: Message) -> torch.Tensor:
        assert self._expected.pop(0) == message
        return self._mailbox.take(message)

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        self._mailbox.put(message, tensor)

    def settle(self) -> None:
        pass


def on_threads(ranks: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all, run at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [each.result(SECONDS) for each in [pool.submit(rank) for rank in ranks]]
