"""The gradient path that docs/extending.md writes, and its task, as a module."""

from __future__ import annotations

import sys
from types import ModuleType

from tests.docs.documents import REPO, python_fences

PAGE = REPO / "docs" / "extending.md"
NAME = "randomk"


def _load() -> ModuleType:
    module = ModuleType("extending_page")
    sys.modules[module.__name__] = module  # where dataclasses look for annotations
    code = "\n\n".join(python_fences(PAGE))
    exec(compile(code, str(PAGE), "exec"), module.__dict__)  # noqa: S102
    return module


MODULE = _load()
