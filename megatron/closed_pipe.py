"""Behaviour of a tool whose reader, such as `head`, has left."""

from __future__ import annotations

import signal


def end_with_reader() -> None:
    """End this process silently, as `cat` does, when it writes to a pipe that nobody reads.

    Python would turn that into an `OSError`, which a tool reports as a broken file. For tools that
    only print: a process with sockets needs the error.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
