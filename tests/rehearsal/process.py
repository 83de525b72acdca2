"""The side of the tests: processes that have the device, which must be there before torch is."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from tests.limits import LIMIT
from tests.rehearsal import guard
from tests.rehearsal.findings import REPO

reason = guard.missing()
needs_rehearsal = pytest.mark.skipif(reason is not None, reason=str(reason))


class Rehearsal:
    """One process that serves many tests, as importing torch costs seconds."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def call(self, function: str, **arguments: Any) -> Any:
        """Return the result of `function`, "module:name", which and whose arguments are JSON's.

        Raises:
            AssertionError: the function raised, or did not return in time.
        """
        process = self._process = self._process or self._start()
        print(json.dumps({"function": function, "arguments": arguments}), file=process.stdin)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.flush()
        line = _line_in_time(process.stdout)
        if not line:
            self.close()
            raise AssertionError(f"no answer; the process said:\n{self._log.read_text()[-4000:]}")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.rehearsal.serve"],
                cwd=REPO,
                env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )


def _line_in_time(stream: IO[str]) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(LIMIT) else ""
