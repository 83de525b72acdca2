"""Files, links and flags that README.md, CONTRIBUTING.md, CHANGELOG.md and docs/ name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import CHANGELOG, CONTRIBUTING, DOCUMENTS, REPO
from tests.limits import LIMIT

OF_OTHERS = {
    "--mpi": "srun",
    "--no-index": "pip",
    "--find-links": "pip",
    "--nproc-per-node": "torchrun",
    "--randomk-density": "the path that docs/extending.md writes",
    "--name": "stands for a flag of sbatch",
    "--account": "sbatch",
    "--qos": "sbatch",
    "--mail-type": "sbatch",
    "--bind": "apptainer",
    "--nv": "apptainer",
    "--rocm": "apptainer",
    "--pid": "apptainer",
    "--containall": "apptainer",
    "--no-cache-dir": "pip",
    "--container-image": "pyxis",
    "--container-mounts": "pyxis",
}
PAGES = [*DOCUMENTS, CONTRIBUTING, CHANGELOG]
TOPS = "configs docs megatron radius samo scripts tests tools".split()


def named_paths(page: Path) -> set[str]:
    """Paths in the repository that a page gives, in links or between backticks."""
    text = page.read_text(encoding="utf-8")
    linked = {str(page.parent / link) for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    spans = re.findall(r"`([\w./-]+)`", text)
    return linked | {str(REPO / s) for s in spans if "/" in s and s.split("/")[0] in TOPS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_files_that_are_named_are_there(page: Path) -> None:
    paths = named_paths(page)
    assert paths
    # NAME stands for the reader's word.
    missing = [path for path in paths if not Path(path).exists() and "NAME" not in path]
    assert not missing


@pytest.mark.push
def test_flags_that_are_named_are_known() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    # Not beginnings of several, such as --dsr-*.
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![a-z0-9*-]|\.\.\.)", text))
    known = ""
    for entry in sorted(REPO.glob("pretrain_*.py")):
        help_ = [sys.executable, entry, "--help"]
        known += subprocess.run(help_, capture_output=True, text=True, timeout=LIMIT).stdout
    for folder in ("scripts", "tools", "megatron/config"):
        for file in (REPO / folder).rglob("*"):
            known += file.read_text(encoding="utf-8") if file.suffix in (".py", ".sh") else ""
    words = set(re.findall(r"--[a-z][a-z0-9-]*", known))
    assert sorted(named - words - OF_OTHERS.keys()) == []
    assert sorted(OF_OTHERS.keys() - named) == []
