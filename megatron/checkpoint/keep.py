"""`--keep-last` and `--save-retain-interval`: older checkpoints make room, once enough newer ones
are known to be good.

A checkpoint is taken away in two moves: renamed to the name of a draft, which nobody reads and the
next save removes, then deleted. So a crash leaves it whole or gone, never a part of it under a name
that counts.

Nothing here imports torch or numpy.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from megatron.checkpoint.files import FILES, Files, failing_as, remove_folder, sync_folder
from megatron.checkpoint.locate import Committed, list_steps, verify_committed
from megatron.errors import CheckpointError

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(kw_only=True)
class Keeper:
    """Keeps the newest `count` steps of a folder that verify, and every multiple of `interval`
    (None: no others). One process for each folder.

    Every byte of a checkpoint is read once by each process, right after its commit for those it
    writes; the verdict stands for as long as sizes and times of its files stay.
    """

    directory: Path
    count: int
    interval: int | None = None
    say: Callable[[str], None]
    files: Files = FILES
    _verdicts: dict[Path, tuple[Stamp, bool]] = field(default_factory=dict)

    def prune(self) -> list[Path]:
        """Delete good steps older than the newest `count` good ones, except multiples of
        `interval`; returns their folders.

        Damaged steps neither count nor go. A failure is told through `say`: the run has what it
        needs, and the next save tries again.
        """
        removed: list[Path] = []
        try:
            kept = 0
            steps = list_steps(self.directory, files=self.files).committed
            for step, folders in groupby(steps, key=lambda folder: folder.step):
                if kept >= self.count and self._is_retained(step):
                    continue
                good = [folder.path for folder in folders if self._verifies(folder)]
                if kept < self.count:
                    kept += bool(good)
                    continue
                for path in good:
                    self._remove(path)
                    removed.append(path)
        except CheckpointError as error:
            self.say(f"older checkpoints stay: {error}")
        return removed

    def _is_retained(self, step: int) -> bool:
        return self.interval is not None and step % self.interval == 0

    def _verifies(self, folder: Committed) -> bool:
        stamp = self._stamp(folder.path)
        known, good = self._verdicts.get(folder.path, (None, False))
        if known == stamp:
            return good
        try:
            verify_committed(folder, files=self.files)
            good = True
        except CheckpointError as error:
            good = False
            self.say(f"not counted as a checkpoint to keep: {error}")
        self._verdicts[folder.path] = stamp, good
        return good

    def _stamp(self, path: Path) -> Stamp:
        with failing_as(path, "read"):
            found = [(name, os.lstat(path / name)) for name in self.files.entries(path)]
        return tuple((name, status.st_size, status.st_mtime_ns) for name, status in found)

    def _remove(self, path: Path) -> None:
        draft = path.with_name(f"{path.name.partition('.')[0]}.tmp-{secrets.token_hex(4)}")
        with failing_as(path, "remove"):
            self.files.rename(path, draft)
            sync_folder(self.files, self.directory)
            remove_folder(self.files, draft)
        del self._verdicts[path]
