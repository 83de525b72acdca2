"""Output and log.txt: the same plain lines in both; on a terminal, short forms and a progress bar.

The bar lives on a terminal only and stays below the lines. log.txt, and output that goes into a
file or a pipe, which programs search, have every line in full.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from megatron.metrics.files import AppendFile
from megatron.metrics.line import timestamp
from megatron.metrics.record import StepRecord
from megatron.metrics.units import scaled

LOG = "log.txt"

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_SECONDS_BETWEEN_REDRAWS = 0.2


class Console:
    """Where lines and the bar go.

    A terminal that goes away (closed pipe) or a disk that is full ends that output, not the run.
    """

    def __init__(
        self,
        log_path: Path,
        *,
        stream: TextIO,
        train_iters: int,
        start_iteration: int = 0,
        bar: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log: AppendFile | None = AppendFile(log_path)
        self._stream: TextIO | None = stream
        self._is_terminal = stream.isatty()
        self._clock = clock
        self._total = train_iters
        self._start = start_iteration
        self._wants_bar = self._is_terminal if bar is None else bar
        self._bar: Any = None
        self._next_redraw = 0.0

    def say(self, text: str, *, brief: str | None = None) -> None:
        """Announce `text`, with the time before its first line and control characters dropped.
        `brief` is as for `line`."""
        time = f" [{timestamp(self._clock())}] "
        self.line(time + text, brief=time + brief if brief else brief)

    def line(self, text: str, *, brief: str | None = None) -> None:
        """Announce `text` as it is, save for control characters. A terminal shows `brief` in its
        place where there is one, and nothing where that is empty."""
        text = _CONTROL.sub("", text) + "\n"
        if brief is None or not self._is_terminal:
            self._show(text)
        elif brief:
            self._show(_CONTROL.sub("", brief) + "\n")
        if self._log is None:
            return
        try:
            self._log.write(text)
        except OSError as error:
            self._log.close()
            self._log = None
            self._show(f" {LOG} cannot be written any more ({error}); the run goes on without\n")

    def advance(self, record: StepRecord) -> None:
        """Move the bar to this step, at most five times a second."""
        if not self._wants_bar:
            return
        now = time.monotonic()
        if now < self._next_redraw and record.iteration < self._total:
            return
        self._next_redraw = now + _SECONDS_BETWEEN_REDRAWS
        try:
            if self._bar is None:
                self._bar = self._make_bar()
            loss, rate = record.lm_loss, scaled(record.tokens_per_second)
            self._bar.set_postfix_str(f"loss {loss:.4f}, {rate}tokens/s", refresh=False)
            self._bar.update(record.iteration - self._bar.n)
        except (OSError, ValueError):  # ValueError: the stream was closed under us
            self._lose_terminal()

    def close(self) -> None:
        """Leave the bar as it stands and close the log; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._wants_bar = None, False
        if self._log is not None:
            self._log.close()
            self._log = None

    def _make_bar(self) -> Any:
        from tqdm import tqdm

        class Bar(tqdm):
            # A watcher thread would only redraw slow bars, and outlive the run.
            monitor_interval = 0

        return Bar(
            total=self._total,
            initial=self._start,
            file=self._stream,
            dynamic_ncols=True,
            mininterval=0,
            bar_format=_BAR_FORMAT,
        )

    def _show(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            if self._bar is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                self._bar.write(text, file=self._stream, end="")
        except UnicodeEncodeError:
            self._show(text.encode("ascii", "backslashreplace").decode("ascii"))
        except (OSError, ValueError):
            self._lose_terminal()

    def _lose_terminal(self) -> None:
        self._stream, self._bar, self._wants_bar = None, None, False
