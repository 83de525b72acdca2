"""Word of what a process does where it prints nothing else for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 8.0
"""Time after which the first word comes, and then each other."""


@contextmanager
def busy(what: str, show: Callable[[str], object]) -> Iterator[None]:
    """Call `show` with `what`, and how long it has taken, each `SECONDS` of the body.

    The calls come from another thread.
    """
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
