"""The compiled kernels of `native.c`, if they are installed. Loads no torch.

pip builds them if it finds a C compiler; nothing requires them. They are a top-level module next to
the packages, so that a clone finds the module installed in its environment.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec

MODULE = "sparsetron_native"
VERSION = 4
"""Version in `native.c`, so that an older build is not used.

It is raised in both files with every change.
"""
INSTRUCTION_SETS = ("AVX2", "AVX-512")
"""Instruction sets for which kernels are compiled, numbered from 1 as in `native.c`."""
_POINTER, _INT64, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_BITMAP = [_POINTER, _POINTER, _POINTER]
_FROM_TO = [_POINTER, _INT64, _POINTER, _INT64]
_HOW = [_INT, _INT]
_ARGUMENTS = {
    "sparsetron_compact": [_INT, *_BITMAP, *_FROM_TO, *_HOW],
    "sparsetron_expand": [_INT, *_BITMAP, _INT64, *_FROM_TO, *_HOW, ctypes.c_float],
    "sparsetron_adamw": [
        *(_INT, *_BITMAP, _POINTER, _POINTER, _INT64),
        *(_POINTER, _POINTER, _POINTER, _INT64, *[_DOUBLE] * 7),
    ],
    "sparsetron_count": [_POINTER, _INT64, _POINTER],
}


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the library; None if it cannot be used.

    It cannot be used if it is not built, does not load, has another version, or has no kernels for
    this processor's instruction sets.
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
    """Return this processor's instruction sets that the kernels can use; the last is the best."""
    library = native_library()
    return () if library is None else INSTRUCTION_SETS[: library.sparsetron_instruction_set()]


def _origin() -> str | None:
    spec = find_spec(MODULE)
    return None if spec is None else spec.origin
