"""Verification of step folders by all ranks of a run, each of which hashes a share of the files.

Rank 0 chooses the folders, and the others wait for it. A large checkpoint takes longer to hash than
a collective may take, so ranks ask each other again and again whether all have finished. Imports
neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.io import FILES, Files
from megatron.checkpoint.verify import verify_folder
from megatron.checkpoint.writer import Gather
from megatron.errors import CheckpointError

T = TypeVar("T")
ASKING_SECONDS = 1.0
"""Seconds between two questions whether all ranks have finished; below every timeout in use."""


@dataclass(frozen=True)
class SharedVerification:
    """The verification of step folders by the ranks of `gather`, of which this one is `rank`."""

    rank: int
    gather: Gather
    files: Files = FILES

    def lead(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns on rank 0; other ranks share its verifications, and get None.

        `work` may call `verify`. Collective; an exception of `work` is raised on rank 0 alone.
        """
        if self.rank:
            while (texts := self.gather(""))[0]:
                # Rank 0 has been told of any error, and decides what follows from it.
                with contextlib.suppress(Exception):
                    self._check_share(Path(texts[0]), len(texts))
            return None
        try:
            return work()
        finally:
            self.gather("")

    def verify(self, folder: Path) -> Manifest:
        """Verify a folder as `verify_folder` does; on rank 0, within `lead`."""
        return self._check_share(folder, len(self.gather(str(folder))))

    def _check_share(self, folder: Path, ranks: int) -> Manifest:
        """Verify a folder together with the other ranks. Raises `CheckpointError` on all of them.

        A rank whose own share is bad raises its own error.
        """
        mine: Future[Manifest] = Future()

        def check() -> None:
            try:
                share = self.rank, ranks
                mine.set_result(verify_folder(folder, share=share, files=self.files))
            except BaseException as error:
                mine.set_exception(error)

        # Not a pool, which would wait for its thread even after the loss of a rank.
        threading.Thread(target=check, name="verify-checkpoint", daemon=True).start()
        answers: list[str | None] = [None]
        while None in answers:
            wait([mine], timeout=ASKING_SECONDS)
            answers = [json.loads(text) for text in self.gather(json.dumps(_answer(mine)))]
        for answer in answers:
            if answer and mine.exception() is None:
                raise CheckpointError(answer)
        return mine.result()


def _answer(verified: Future[Manifest]) -> str | None:
    """Return None while a share is checked, then what is wrong with it, "" if nothing is."""
    if not verified.done():
        return None
    error = verified.exception()
    kind = "" if error is None or isinstance(error, CheckpointError) else type(error).__name__
    return f"{kind}: {error}" if kind else str(error or "")
