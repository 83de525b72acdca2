"""Rules on where a run may write, and on what it may be called."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.values import show

if TYPE_CHECKING:
    from megatron.config.config import Config

_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,127}")


def run_is_well_named(c: Config) -> str | None:
    """The complaint about the run's name, which ends up in paths and job scripts."""
    if c.run.run_dir is None:
        field, name, way_out = "configuration's name", c.name, "rename the file or give --run-dir"
    else:
        field, name, way_out = "run_dir", _last_part(c.run.run_dir), "choose another name"
    if _NAME.fullmatch(name) and name not in (".", ".."):
        return None
    return (
        f"{field}: {show(name)} is no name for a run; must be at most 128 of A-Z a-z 0-9 . _ -, "
        f"not . or .., not beginning with -; {way_out}"
    )


def _last_part(path: str) -> str:
    """What the user wrote after the last slash; `Path.name` would hide a final "."."""
    return path.rstrip("/").rpartition("/")[2]


def output_folders_are_safe(c: Config) -> str | None:
    """The complaint about a place to write to where other things live."""
    taken = {Path("/"): "the root folder", real_path(os.path.expanduser("~")): "the home folder"}
    taken |= {folder: "a data folder" for folder in _data_folders(c)}
    for name, folder in (("run_dir", c.run.run_dir), ("save", c.checkpoint.save)):
        if folder is None:
            continue
        resolved = real_path(folder)
        if resolved in taken:
            return (
                f"{name}: {show(folder)} is {taken[resolved]} ({resolved}); must be a folder of "
                f"its own, such as {resolved / 'run1'}"
            )
    return None


def real_path(path: str) -> Path:
    """Absolute path without symbolic links; a loop of them is left as it is, not an error."""
    return Path(os.path.realpath(path))


def _data_folders(c: Config) -> list[Path]:
    d = c.data
    lists = (d.data_path, d.train_data_path, d.valid_data_path, d.test_data_path)
    return [real_path(prefix).parent for paths in lists for prefix in paths or ()]
