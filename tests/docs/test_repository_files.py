"""Files at the top of the repository agree with the project: citation, editors, history, guide."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

from tests.docs.documents import CHANGELOG, CONTRIBUTING, REPO

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
GUIDE = CONTRIBUTING.read_text(encoding="utf-8")
IGNORED = [
    line
    for line in (REPO / ".git-blame-ignore-revs").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_the_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    required = {"cff-version", "message", "title", "authors"}
    assert required <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    project = PYPROJECT["project"]
    assert citation["title"].lower() == project["name"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_papers_are_cited_with_authors_and_years() -> None:
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    papers = citation["references"]
    for paper in papers:
        assert {"type", "title", "authors", "year"} <= paper.keys()
        assert all({"family-names", "given-names"} == author.keys() for author in paper["authors"])
        assert 2019 <= paper["year"] <= 2025
    found = " ".join(paper["title"] for paper in papers)
    assert len(papers) == 4
    for word in ("Radius", "AxoNN", "Exploiting Sparsity in Pruned", "Low-Memory Neural Network"):
        assert word in found


def _editor_settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    # What stands before the first section has none.
    text = (REPO / ".editorconfig").read_text(encoding="utf-8")
    parser.read_string(f"[top]\n{text}")
    return parser


def test_editors_and_ruff_agree() -> None:
    settings = _editor_settings()
    assert settings["top"]["root"] == "true"
    python = {**settings["*"], **settings["*.py"]}
    assert int(python["max_line_length"]) == PYPROJECT["tool"]["ruff"]["line-length"]
    assert (python["indent_style"], python["indent_size"]) == ("space", "4")
    assert (python["charset"], python["end_of_line"]) == ("utf-8", "lf")


def test_files_are_as_editors_would_leave_them() -> None:
    """Python is ruff's."""
    folders = ("configs", "docs", "radius", "scripts", "tests", "tools")
    suffixes = (".sh", ".env", ".yaml", ".toml", ".md", ".cff", ".c")
    files = [file for folder in folders for file in (REPO / folder).rglob("*.*")]
    files = [file for file in (*files, *REPO.glob("*.*")) if file.suffix in suffixes]
    names = (".ci/run", ".editorconfig", ".git-blame-ignore-revs", ".gitignore", "constraints.txt")
    for file in (*files, *(REPO / name for name in names)):
        text = file.read_bytes().decode("utf-8")
        assert text.endswith("\n") and "\r" not in text, file
        assert not re.search(r"[ \t]$|^ *\t", text, re.MULTILINE), file


def _git(*arguments: str) -> str:
    if shutil.which("git") is None or not (REPO / ".git").exists():
        pytest.skip("no history here")
    done = subprocess.run(["git", "-C", REPO, *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(done.stderr.strip())
    return done.stdout


def test_hashes_that_blame_passes_over_are_whole() -> None:
    assert IGNORED and all(re.fullmatch(r"[0-9a-f]{40}", line) for line in IGNORED)


@pytest.mark.push
@pytest.mark.parametrize("commit", IGNORED)
def test_a_commit_that_blame_passes_over_only_reformats(commit: str) -> None:
    if "commit" not in _git("cat-file", "-t", commit):
        pytest.fail(f"{commit} is no commit")
    lines = _git("show", "--format=", "-U0", "--no-renames", commit).splitlines()
    before, after = (
        "".join(line[1:] for line in lines if line[:1] == sign and line[:3] != 3 * sign)
        for sign in "-+"
    )
    assert "".join(before.split()) == "".join(after.split()) != ""


def test_scripts_and_tests_of_the_guide_are_there() -> None:
    named = set(re.findall(r"(?:\.ci|configs|megatron|scripts|tests|tools)/[\w./-]*\w", GUIDE))
    assert ".ci/run" in named and "tests/test_layers.py" in named
    missing = [path for path in named if not (REPO / path).exists() and "NAME" not in path]
    assert missing == []
    for file, test in re.findall(r"pytest (tests/\S+\.py)::(\w+)", GUIDE):
        assert f"def {test}(" in (REPO / file).read_text(encoding="utf-8")


def test_names_of_code_in_the_guide_are_there() -> None:
    """A table that says where to add something leads to the place."""
    rows = re.findall(r"^\| an? [^|]+ \| (.*) \|$", GUIDE, re.MULTILINE)
    assert len(rows) >= 8
    for row in rows:
        files = [REPO / path for path in re.findall(r"`([\w/.]+\.py)`", row)]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`([A-Z][A-Za-z_]+)`", row):
            assert name in text, f"{name} is in none of {row}"


def test_layers_of_the_guide_are_those_that_are_tested() -> None:
    from tests.test_layers import FOR_EXTENSIONS

    section = GUIDE.partition("\n## Import layers\n")[2].partition("\n## ")[0]
    line = re.search(r"^- `radius` and `samo` .*?^- ", section, re.MULTILINE | re.DOTALL)
    assert line is not None
    assert set(re.findall(r"`(megatron\.[\w.]+)`", line[0])) == set(FOR_EXTENSIONS)


def test_the_changelog_begins_with_what_is_not_released() -> None:
    headings = re.findall(r"^## (.*)$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
