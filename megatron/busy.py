"""Messages about an operation that takes long, so that a process is not silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 8.0
"""Interval between messages, and the time before the first one."""


@contextmanager
def busy(what: str, show: Callable[[str], object]) -> Iterator[None]:
    """Call `show` every `SECONDS` of the body with `what` and the elapsed time, in a thread."""
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(SECONDS):
            show(f"{what}: {time.monotonic() - began:.0f} s so far")

    teller = threading.Thread(target=tell, name="busy", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
