"""A pipeline in one process: its ranks are threads and share one mailbox."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import TypeVar

import torch

from megatron.pipeline.schedule import Kind, Message
from tests.limits import LIMIT

T = TypeVar("T")


class Mailbox:
    """A store of messages that have arrived but are not received; `order` lists all arrivals."""

    def __init__(self) -> None:
        self.order: list[Message] = []
        self._tensors: dict[Message, torch.Tensor] = {}
        self._changed = threading.Condition()

    def put(self, message: Message, tensor: torch.Tensor) -> None:
        with self._changed:
            self._arrive(message, tensor.clone())

    def take(self, message: Message) -> torch.Tensor:
        with self._changed:
            self._stand(lambda: message in self._tensors)
            return self._tensors.pop(message)

    def look(self, messages: Sequence[Message], *, wait: bool) -> list[Message]:
        """Return the messages that have arrived, in order of arrival."""
        with self._changed:
            self._stand(lambda: not wait or any(each in self._tensors for each in messages))
            return [each for each in self.order if each in messages and each in self._tensors]

    @property
    def is_empty(self) -> bool:
        return not self._tensors

    def _arrive(self, message: Message, tensor: torch.Tensor) -> None:
        assert message not in self._tensors, f"{message} is sent twice"
        self.order.append(message)
        self._tensors[message] = tensor
        self._changed.notify_all()

    def _stand(self, until: Callable[[], bool]) -> None:
        """Wait until the condition `until` holds."""
        assert self._changed.wait_for(until, LIMIT), "what is waited for never came"


class DrawnMailbox(Mailbox):
    """A mailbox that draws which rank runs next and which messages arrive in between.

    One rank runs at a time, up to its next look for messages. Messages do not overtake others of
    their kind that go the same way. The ranks must be started by `on_threads` of this mailbox.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)
        self._under_way: dict[tuple[Kind, int], list[tuple[Message, torch.Tensor]]] = {}
        self._standing: dict[int, Callable[[], bool]] = {}
        self._running = 0
        self._turn: int | None = None
        self._me = threading.local()

    def on_threads(self, ranks: Sequence[Callable[[], T]]) -> list[T]:
        """Run all ranks and return their results."""

        def run(number: int) -> T:
            self._me.number = number
            try:
                with self._changed:
                    self._stand(lambda: True)
                return ranks[number]()
            finally:
                with self._changed:
                    self._rest()

        self._running = len(ranks)
        return on_threads([partial(run, number) for number in range(len(ranks))])

    def put(self, message: Message, tensor: torch.Tensor) -> None:
        with self._changed:
            way = self._under_way.setdefault((message.kind, message.boundary), [])
            way.append((message, tensor.clone()))

    def _stand(self, until: Callable[[], bool]) -> None:
        me = self._me.number
        self._standing[me] = until
        self._rest()
        assert self._changed.wait_for(lambda: self._turn == me, LIMIT), "never its turn"
        self._turn = None
        self._running += 1

    def _rest(self) -> None:
        """Let the last rank that stops running draw the next event."""
        self._running -= 1
        while not self._running and self._turn is None and self._standing:
            ready = sorted(me for me, until in self._standing.items() if until())
            ways = [way for way in self._under_way.values() if way]
            assert ready or ways, "all wait, and nothing is under way"
            if ways and (not ready or self._random.random() < 0.5):
                self._arrive(*self._random.choice(ways).pop(0))
            else:
                self._turn = self._random.choice(ready)
                del self._standing[self._turn]
                self._changed.notify_all()


class HeldMailbox(Mailbox):
    """A mailbox that holds a message back until the message `after(message)` has arrived."""

    def __init__(self, after: Callable[[Message], Message | None]) -> None:
        super().__init__()
        self._after = after
        self._held: dict[Message, torch.Tensor] = {}

    def _arrive(self, message: Message, tensor: torch.Tensor) -> None:
        self._held[message] = tensor
        while free := [each for each in self._held if self._after(each) in (None, *self.order)]:
            super()._arrive(free[0], self._held.pop(free[0]))


class Loopback:
    """A `Transport` of one rank over a mailbox shared with the other ranks."""

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

    def wait_for_sends(self) -> None:
        pass

    def close(self) -> None:
        pass


class ArrivalLoopback(Loopback):
    """An `ArrivalTransport` over a mailbox.

    `received` lists the received messages, each with all messages that had arrived at that time.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.received: list[tuple[Message, list[Message]]] = []

    def arrived(self, *, wait: bool) -> Sequence[Message]:
        return self._mailbox.look(self._next(), wait=wait)

    def receive(self, message: Message) -> torch.Tensor:
        expected = self._next()
        assert message in expected, "of each kind the next one"
        self._mailbox.look([message], wait=True)
        self.received.append((message, self._mailbox.look(expected, wait=False)))
        self._expected.remove(message)
        return self._mailbox.take(message)

    def _next(self) -> list[Message]:
        firsts = [next((m for m in self._expected if m.kind is kind), None) for kind in Kind]
        return [message for message in firsts if message is not None]


def on_threads(ranks: Sequence[Callable[[], T]]) -> list[T]:
    """Run all ranks at once and return their results."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [each.result(LIMIT) for each in [pool.submit(rank) for rank in ranks]]
