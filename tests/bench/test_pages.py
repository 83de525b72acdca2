"""Each folder of tools/bench states its finding and what made it, and is in the index."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tools.bench.common.page_files import FIGURE, MARK, PAGE, RESULTS, write_page

REPO = Path(__file__).resolve().parents[2]
BENCH = REPO / "tools" / "bench"
INDEX = REPO / "docs" / "benchmarks.md"
SHARED = "common"
FOLDERS = sorted(
    folder for folder in BENCH.iterdir() if (folder / PAGE).is_file() or any(folder.glob("*.py"))
)
QUESTIONS = [folder for folder in FOLDERS if folder.name != SHARED]
MADE_BY = re.compile(
    r"^`(tools/[\w/]+\.py)[^`\n]*` \(last in commit [0-9a-f]{8}\) made .*; "
    r"the program is not kept\.$",
    re.MULTILINE,
)
"""The line that names a program which the tree no longer has."""
PAGES = sorted([*BENCH.rglob("*.md"), *(REPO / "tools" / "planner").rglob("*.md")])


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO))


@pytest.mark.parametrize("folder", QUESTIONS, ids=lambda folder: folder.name)
def test_a_page_begins_with_its_question_and_what_was_found(folder: Path) -> None:
    title, blank, *finding = (folder / PAGE).read_text(encoding="utf-8").splitlines()[:10]
    assert re.fullmatch(r"# .+\?", title) and not blank
    assert finding[0] and not finding[0].startswith(("|", "!", "`", "#", " ")), "a sentence"
    assert "" in finding, "the finding ends within ten lines"


@pytest.mark.parametrize(
    "name",
    [
        "convergence",
        "gradient_path",
        "loss_by_bytes",
        "rolling",
        "samo_path",
        "samo_vision",
        "time_to_loss",
        "wire",
    ],
)
def test_savings_are_told_beside_dense_gradients_of_16_bits(name: str) -> None:
    """A path that sends fp32 values competes with a flag that halves the bytes of dense."""
    head = (BENCH / name / PAGE).read_text(encoding="utf-8").splitlines()[:10]
    (row,) = [line for line in INDEX.read_text("utf-8").splitlines() if f"/{name}/" in line]
    assert "dense bf16" in " ".join(head) and "bf16" in row


def test_the_index_has_every_question_once() -> None:
    linked = re.findall(r"\]\(\.\./tools/bench/(\w+)/README\.md\)", INDEX.read_text("utf-8"))
    assert sorted(linked) == [folder.name for folder in QUESTIONS]
    for name in linked:
        title = (BENCH / name / PAGE).read_text(encoding="utf-8").splitlines()[0]
        assert f"[{title.removeprefix('# ')}](" in INDEX.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_and_programs_are_there(page: Path) -> None:
    text = MADE_BY.sub("", page.read_text(encoding="utf-8"))
    missing = [
        link
        for link in re.findall(r"\]\(([^)#:]+)\)", text)
        if not (page.parent / link).resolve().exists()
    ]
    assert missing == []
    for module in re.findall(r"-m (tools\.[\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module
    for path in re.findall(r"tools/[\w/]+\.(?:py|sh)", text):
        assert (REPO / path).is_file(), path


@pytest.mark.parametrize("folder", QUESTIONS, ids=lambda folder: folder.name)
def test_numbers_have_a_program_a_study_or_the_commit_of_one(folder: Path) -> None:
    named = MADE_BY.findall((folder / PAGE).read_text(encoding="utf-8"))
    assert not any((REPO / path).exists() for path in named)
    makers = [*folder.glob("*.py"), *folder.glob("*.yaml")]
    assert len(named) <= 1 and not (named and makers)
    if any(folder.glob("*.json")):
        assert named or makers


@pytest.mark.parametrize("folder", QUESTIONS, ids=lambda folder: folder.name)
def test_what_a_run_writes_keeps_the_head(folder: Path) -> None:
    """A page with stored numbers, and no other page, has the mark exactly once."""
    text = (folder / PAGE).read_text(encoding="utf-8")
    assert text.count(f"\n{MARK}\n") == (folder / RESULTS).is_file()


def test_a_page_keeps_its_head_and_takes_new_numbers(tmp_path: Path) -> None:
    def draw(path: Path) -> None:
        path.write_bytes(b"png")

    write_page(tmp_path, text="one\n", values={"a": 1}, draw=draw)
    assert (tmp_path / PAGE).read_text() == "one\n"
    (tmp_path / PAGE).write_text(f"# Why?\n\nSo.\n\n{MARK}\n\none\n")
    write_page(tmp_path, text="two\n", values={"a": 2}, draw=draw)
    assert (tmp_path / PAGE).read_text() == f"# Why?\n\nSo.\n\n{MARK}\n\ntwo\n"
    assert (tmp_path / RESULTS).read_text() == '{\n "a": 2\n}\n'
    write_page(tmp_path, text="of another kind\n", values=[], part="cost")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        [PAGE, RESULTS, FIGURE, "cost.md", "cost.json"]
    )
    assert (tmp_path / PAGE).read_text().endswith("two\n")


def test_no_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_page(None, text="", values=object())
    assert list(tmp_path.iterdir()) == []
