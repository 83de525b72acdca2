"""Loaders that have no command of their own, called as commands are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import SparsetronError
from samo.mask import load_masks


def main(argv: Sequence[str]) -> int:
    """Load a file of masks and print what it holds."""
    try:
        masks = load_masks(Path(argv[0]))
    except SparsetronError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for name in masks:
        print(name, tuple(masks[name].shape), int(masks[name].count_nonzero()))
    return 0
