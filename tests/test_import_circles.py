"""No module imports itself by way of others, not even for annotations; no library imports tools."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ENTRIES = tuple(path.name for path in sorted(REPO.glob("pretrain_*.py")))
TOPS = (*ENTRIES, "megatron", "radius", "samo", "tools")


def modules(root: Path) -> dict[str, Path]:
    """The Python files of the product below a folder, by module name."""
    found: dict[str, Path] = {}
    for top in TOPS:
        for file in [root / top] if top.endswith(".py") else sorted((root / top).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules that each module names in any import statement, wherever the statement stands."""
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inner & files.keys() or {node.module}
        found[module] = (names & files.keys()) - {module}
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one import circle, in order; empty where there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        for name in sorted(graph[module]):
            if found := visit(name):
                return found
        done.add(path.pop())
        return []

    return next((found for module in sorted(graph) if (found := visit(module))), [])


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_there_is_no_circle() -> None:
    graph = imports(modules(REPO))
    assert len(graph) > 300
    assert circle(graph) == []


def test_no_library_imports_tools() -> None:
    graph = imports(modules(REPO))
    for module, names in graph.items():
        if not module.startswith("tools"):
            assert not [name for name in names if name.split(".")[0] == "tools"], module
