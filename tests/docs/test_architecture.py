"""docs/architecture.md and the code agree; docs/index.md lists every page."""

from __future__ import annotations

import re

import pytest

from tests.docs.documents import REPO

DOCS = REPO / "docs"
ROW = re.compile(r"^\| (\d+) \| .* \| `([^`]+)`(?:, `[^`]+`)* \|$", re.MULTILINE)
STEPS = ROW.findall((DOCS / "architecture.md").read_text(encoding="utf-8"))


def test_steps_are_numbered_without_a_gap() -> None:
    assert [int(number) for number, _ in STEPS] == list(range(1, 16))


@pytest.mark.parametrize(("number", "file"), STEPS, ids=[number for number, _ in STEPS])
def test_the_first_file_of_a_step_carries_its_mark(number: str, file: str) -> None:
    code = (REPO / file).read_text(encoding="utf-8")
    assert re.search(rf"Batch step {number}\b", code)


def test_code_marks_no_step_that_the_page_does_not_have() -> None:
    known = {number for number, _ in STEPS}
    for file in (REPO / "megatron").rglob("*.py"):
        marked = set(re.findall(r"Batch step (\d+)", file.read_text(encoding="utf-8")))
        assert marked <= known, file


def test_the_index_lists_every_page_once() -> None:
    linked = re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    files = [*DOCS.glob("*.md"), *DOCS.glob("benchmarks/*.md")]
    pages = {str(page.relative_to(DOCS)) for page in files} - {"index.md"}
    pages |= {"examples/README.md"}
    assert sorted(linked) == sorted(pages)
