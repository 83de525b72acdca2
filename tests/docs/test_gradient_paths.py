"""The tables of docs/gradient-paths.md say what the program accepts."""

from __future__ import annotations

import pytest

from megatron.config import parse, resolve
from megatron.errors import ConfigError
from pretrain_gpt import GRADIENT_PATHS
from tests.contract.pairs import RUN
from tests.docs.documents import REPO

PAGE = REPO / "docs" / "gradient-paths.md"
SETTINGS = {
    "`--use-distributed-optimizer`": "--use-distributed-optimizer",
    "`--dp-inner-size`": "--dp-inner-size 2",
    "`--optimizer-cpu-offload`": "--optimizer-cpu-offload --bf16",
    "`--grad-wire`": "--grad-wire int4",
}
NEEDED = {"radius": "--radius-interval 20", "samo": "--samo-pruning random"}
"""Flags that a path needs in a short run."""


def together() -> dict[str, dict[str, str]]:
    """Return the table "What goes together": by path, what each setting's cell says."""
    text = PAGE.read_text(encoding="utf-8").partition("## What goes together")[2].partition("##")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    (_, *settings), _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return {
        path.strip("` "): dict(zip(settings, cells, strict=True))
        for paths, *cells in rows
        for path in paths.split(",")
    }


def is_accepted(path: str, more: str = "") -> bool:
    """Return whether the program accepts a short run of a path on four ranks with more flags."""
    needed = [flags for part, flags in NEEDED.items() if part in path.split("+")]
    flags = " ".join([RUN, "--grad-path", path, *needed, more])
    try:
        resolve(parse(flags.split(), paths=GRADIENT_PATHS), 4)
    except ConfigError:
        return False
    return True


def test_every_path_has_a_row() -> None:
    assert set(together()) == set(GRADIENT_PATHS)
    assert all(is_accepted(path) for path in GRADIENT_PATHS), "alone"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("path", GRADIENT_PATHS)
def test_what_goes_together_is_accepted(path: str, setting: str) -> None:
    accepted = is_accepted(path, SETTINGS[setting])
    assert together()[path][setting].startswith("yes" if accepted else "no")
