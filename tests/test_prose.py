"""Public methods have docstrings, docstrings say all once, and class names are used once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ENTRIES = tuple(path.name for path in sorted(REPO.glob("pretrain_*.py")))
PRODUCT = (*ENTRIES, "megatron", "radius", "samo", "tools")
TOPS = (*PRODUCT, "tests", "docs/examples")
OPENERS = re.compile(r"(Of|By|That|Those|Both|The same|As|See)\b")
"""First words after which the subject of a sentence is missing or elsewhere."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(text := statement.value.value, str):
                    yield statement.lineno, text.strip()


def badly_opened(source: str) -> list[int]:
    """Return the lines of docstrings that begin with one of `OPENERS`."""
    return [line for line, text in docstrings(source) if OPENERS.match(text)]


def test_a_bad_opener_is_found() -> None:
    source = (
        'A = 1\n"""Of a bucket."""\ndef f():\n    """Official."""\ndef g():\n    """See f."""\n'
    )
    assert badly_opened(source) == [2, 6]


def repeated(source: str) -> list[int]:
    """Return the lines of docstrings that hold a sentence twice."""
    found = []
    for line, text in docstrings(source):
        sentences = [part.rstrip(".") for part in re.split(r"(?<=\.)\s+", " ".join(text.split()))]
        long = [sentence for sentence in sentences if re.search(r"[A-Za-z]{5}", sentence)]
        found += [line] * (len(long) > len(set(long)))
    return found


def class_names(source: str) -> list[str]:
    """Return the names of all classes, nested ones too."""
    return [n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]


def sources(*tops: str) -> dict[str, str]:
    """Return the text of the Python files below `tops`, by path."""
    files = [file for top in tops for file in sorted((REPO / top).rglob("*.py"))]
    files += [REPO / top for top in tops if top.endswith(".py")]
    return {str(f.relative_to(REPO)): f.read_text(encoding="utf-8") for f in files}


def undescribed(texts: Mapping[str, str]) -> list[str]:
    """Return the public methods without a docstring of their own, of a base class or a protocol.

    ruff's D102 cannot see the docstring that an override inherits.
    """
    nodes = [n for text in texts.values() for n in ast.walk(ast.parse(text))]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    bases = {
        name: [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        for name, node in classes.items()
    }
    methods = {
        name: {m.name: ast.get_docstring(m) for m in node.body if isinstance(m, ast.FunctionDef)}
        for name, node in classes.items()
    }
    in_protocols = {m for name in classes if "Protocol" in bases[name] for m in methods[name]}

    def described(name: str, method: str) -> bool:
        own = methods.get(name, {}).get(method)
        return bool(own) or any(described(base, method) for base in bases.get(name, ()))

    return [
        f"{name}.{method}"
        for name in classes
        for method in methods[name]
        if not name.startswith("_") and not method.startswith("_")
        if method not in in_protocols and not described(name, method)
    ]


def test_a_method_without_words_is_found() -> None:
    described = 'class A:\n    def f(self):\n        "Do it."\n'
    bare = "class B(A):\n    def f(self): ...\n    def g(self): ...\n    def _h(self): ...\n"
    assert undescribed({"a.py": described, "b.py": bare}) == ["B.g"]


def test_public_methods_are_described() -> None:
    assert undescribed(sources(*PRODUCT)) == []


def test_docstrings_open_with_their_subject() -> None:
    texts = sources(*TOPS)
    assert len(texts) > 500
    assert [f"{name}:{line}" for name, text in texts.items() for line in badly_opened(text)] == []


def test_a_repeated_sentence_is_found() -> None:
    assert repeated('"""Return it. Collective over all.\n\n    Collective over all.\n"""') == [1]
    assert repeated('"""Return a. Return b. E.g. this. E.g. that."""') == []


def test_docstrings_say_everything_once() -> None:
    texts = sources(*TOPS)
    assert [f"{name}:{line}" for name, text in texts.items() for line in repeated(text)] == []


def test_no_class_name_is_used_twice() -> None:
    assert class_names("class A:\n    class B: ...\ndef f():\n    class A: ...\n") == [
        "A",
        "B",
        "A",
    ]
    where: dict[str, list[str]] = {}
    for file, text in sources(*PRODUCT).items():
        for name in class_names(text):
            where.setdefault(name, []).append(file)
    assert len(where) > 300
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
