"""The compiled kernels of `native.c`, where there are any.

Loads no torch.

pip builds them where it finds a C compiler; nothing needs them. They are a module of their own
beside the packages, so that a clone finds those that were installed in its environment.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec

MODULE = "sparsetron_native"
VERSION = 3
"""The version in `native.c`, raised in both places with every change, so that an older build is
not used.
"""
INSTRUCTION_SETS = ("AVX2", "AVX-512")
"""What the kernels are compiled for, as `native.c` numbers them from 1 on."""
_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_BITMAP = [_POINTER, _POINTER, _POINTER]
_FROM_TO = [_POINTER, _INT64, _POINTER, _INT64]
_HOW = [_INT, _INT]
_ARGUMENTS = {
    "sparsetron_compact": [_INT, *_BITMAP, *_FROM_TO, *_HOW],
    "sparsetron_expand": [_INT, *_BITMAP, _INT64, *_FROM_TO, *_HOW, ctypes.c_float],
    "sparsetron_count": [_POINTER, _INT64, _POINTER],
}


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the library, or None.

    None: not built, of another version, or on a processor without its instruction sets.
    """
    origin = _origin()
    if origin is None:
        return None
    try:
        library = ctypes.CDLL(origin)
        if library.sparsetron_version() != VERSION or not library.sparsetron_instruction_set():
            return None
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = None if name == "sparsetron_count" else _INT64
    except (OSError, AttributeError):
        return None
    return library


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets of this processor that the kernels can use; the last is the best."""
    library = native_library()
    return () if library is None else INSTRUCTION_SETS[: library.sparsetron_instruction_set()]


def _origin() -> str | None:
    spec = find_spec(MODULE)
    return None if spec is None else spec.origin
