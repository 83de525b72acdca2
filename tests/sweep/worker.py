"""A process that runs the project's commands one after the other, as many users would.

Requests are JSON lines on one descriptor, answers are written to another. Output is captured at
descriptor level, so that panics of compiled libraries are included. Address space is limited, so
that a command cannot take the machine's memory.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2 << 30
"""Address space that commands may use in addition to the loaded libraries."""
FILE_BYTES = 256 << 20
"""Longest file that a command may write; a longer one is an `OSError`."""
SHOWN_BYTES = 1 << 20
READY = "ready"
"""First line of the answers."""
MAIN = {"pretrain_gpt": "pretrain_gpt", "load_masks": "tests.sweep.loaders"}
"""Modules with a `main`; all other commands are modules of tools."""


def run(command: str, argv: Sequence[str]) -> int:
    """Run one command and return the exit code that a shell would see."""
    name = MAIN.get(command, f"tools.{command}")
    sys.argv = [f"{command}.py", *argv]
    try:
        code = importlib.import_module(name).main(list(argv))
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    return int(code or 0)


def answer(request: dict[str, Any], captured: Sequence[io.BufferedRandom]) -> dict[str, Any]:
    """Run a request in its folder and environment; restore both afterwards."""
    environment, folder = dict(os.environ), os.getcwd()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for file in captured:
        file.seek(0)
        file.truncate()
    try:
        code = run(request["command"], request["argv"])
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = (_text(file) for file in captured)
    return {"code": code, "out": out, "err": err}


def _text(file: io.BufferedRandom) -> str:
    file.seek(0)
    return file.read(SHOWN_BYTES).decode(errors="replace")


def main() -> None:
    """Serve until the requests end."""
    requests, answers = (int(text) for text in sys.argv[1:3])
    importlib.import_module("torch").set_num_threads(1)
    captured = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
    for number, file in enumerate(captured, 1):
        os.dup2(file.fileno(), number)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may hold bytes that are not text; a terminal shows them somehow.
            stream.reconfigure(errors="backslashreplace")
    _limit()
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as replies:
        replies.write(f"{READY}\n")
        replies.flush()
        for line in lines:
            replies.write(json.dumps(answer(json.loads(line), captured)) + "\n")
            replies.flush()


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for kind, most in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    main()
