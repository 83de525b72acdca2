"""Leaves with a word and our exit code where a C++ library would abort this process.

gloo and NCCL's watchdog throw in threads of their own, where nothing can catch: gloo when a peer
sends more than this rank expects, which is how ranks that are out of step usually end.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

from megatron.errors import PeerError


def before_abort(tell: Callable[[], object]) -> None:
    """From here on, call `tell` before C++ ends this process, and end it with exit code 6.

    For good: there is no way back from where it is called. Does nothing where C++ is not GNU's.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        libc = ctypes.CDLL(None)
    except (OSError, AttributeError):
        return
    function = ctypes.CFUNCTYPE(None)
    # The handler that was there before prints the exception; then it raises SIGABRT, whose number
    # is, by luck, what _exit is to be called with.
    assert PeerError.exit_code == signal.SIGABRT

    def terminate() -> None:
        libc.signal(signal.SIGABRT, ctypes.cast(libc._exit, ctypes.c_void_p))
        try:
            tell()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        before()

    handler = function(terminate)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    set_terminate.argtypes, set_terminate.restype = [function], function
    before = set_terminate(handler)
