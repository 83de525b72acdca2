"""A program that tests start as a fork finds what a cold start finds, and ends like one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import program
from tests.limits import LIMIT
from tests.program import REPO, WITHOUT_PICTURES

LOCALE = {name: os.environ[name] for name in ("LANG", "LC_ALL", "LC_CTYPE") if name in os.environ}
ENVIRONMENT = LOCALE | {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "A": "b"}
LOOK = """
import json, os, signal, sys, warnings
import torch
state = open("/proc/self/status").read().splitlines()
print(json.dumps({
    "argv": sys.argv, "name": __name__, "folder": os.getcwd(), "environment": dict(os.environ),
    "path": [place for place in sys.path if place.startswith(sys.argv[1])],
    "main": sys.path[0], "threads": torch.get_num_threads(), "input": sys.stdin.read(),
    "signals": [str(signal.getsignal(n)) for n in (2, 10, 12, 13, 15, 17)],
    "masks": [line for line in state if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
    "warnings": [sys.warnoptions, len(warnings.filters)],
    "streams": [
        [s.fileno(), s.encoding.lower(), s.errors, s.line_buffering, s.isatty()]
        for s in (sys.stdout, sys.stderr)
    ],
}))
"""


def write(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def cold(script: str, *argv: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, script, *argv], env=env, cwd=cwd, stdin=subprocess.DEVNULL, timeout=LIMIT,
        capture_output=True, text=True,
    )  # fmt: skip


def test_a_fork_finds_what_a_cold_start_finds(tmp_path: Path) -> None:
    script = write(tmp_path, LOOK)
    env = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path / 'a'}:{tmp_path / 'b'}"}
    started = cold(script, str(tmp_path), env=env, cwd=tmp_path)
    forked = program.run(script, [str(tmp_path)], env=env, cwd=tmp_path)
    assert forked.returncode == started.returncode == 0, forked.stderr
    assert json.loads(forked.stdout) == json.loads(started.stdout)
    assert forked.stderr == started.stderr == ""


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('told')", 1, "told\n"),
        ("raise KeyError('told')", 1, "KeyError: 'told'\n"),
        ("import os; os._exit(75)", 75, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_fork_ends_like_a_cold_start(tmp_path: Path, text: str, code: int, told: str) -> None:
    script = write(tmp_path, text)
    for done in (
        cold(script, env=ENVIRONMENT, cwd=tmp_path),
        program.run(script, [], env=ENVIRONMENT, cwd=tmp_path),
    ):
        assert done.returncode == code and done.stdout == ""
        assert done.stderr.endswith(told) and bool(done.stderr) == bool(told)


def test_streams_end_with_their_program_whatever_else_runs(tmp_path: Path) -> None:
    script = write(tmp_path, "print('ready', flush=True)\nimport time\ntime.sleep(3600)\n")

    def begin() -> program.Program:
        return program.start(script, [], env=ENVIRONMENT, cwd=tmp_path)

    first, second = begin(), begin()
    assert first.stdout.readline() == second.stdout.readline() == "ready\n"
    third = begin()
    try:
        for each in (second, first):
            assert each.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                each.communicate(0.01)
            each.terminate()
            # An end of the pipe in one of the others would keep this from returning.
            assert each.communicate(LIMIT) == ("", "")
            assert each.returncode == each.wait() == -signal.SIGTERM
        assert third.poll() is None
    finally:
        third.kill()
    third.communicate(LIMIT)
    assert third.returncode == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        program.run(script, [], env=ENVIRONMENT, cwd=tmp_path, timeout=0.01)


def test_nothing_draws(tmp_path: Path) -> None:
    text = "from megatron.report.drawing import can_draw\nprint(can_draw())\n"
    script = write(tmp_path, text)
    env = ENVIRONMENT | {"PYTHONPATH": f"{WITHOUT_PICTURES}:{REPO}"}
    assert cold(script, env=env, cwd=tmp_path).stdout == "False\n"
    env["PYTHONPATH"] = str(REPO)
    assert program.run(script, [], env=env, cwd=tmp_path).stdout == "False\n"
