"""Behaviour of a command-line tool whose output pipe was closed by the reader, such as `head`."""

from __future__ import annotations

import signal


def end_with_reader() -> None:
    """End this process silently, as `cat` does, when it writes to a closed pipe.

    By default Python raises an `OSError`, which a tool would report as a broken file. Only for
    tools that print: a process with sockets needs the error.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
