"""Pipes, devices and links in a run folder neither hold up a reader nor lead a writer elsewhere."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path

import pytest

from megatron.config.sections import LoggingConfig
from megatron.fault_tolerance.heartbeat import LOOK
from megatron.fault_tolerance.root_cause import _opened
from megatron.metrics import Metrics
from megatron.metrics.logger import JSONL, LOG, cut_metrics
from megatron.regular_file import open_regular, read_regular
from megatron.report import write_report
from megatron.status import STATUS, Status, read_status, write_status
from tools.status import main


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "folder"):
        with pytest.raises(OSError):
            open_regular(path, flags)


def test_a_link_is_read_and_never_written(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("a")
    (tmp_path / "link").symlink_to("victim")
    assert read_regular(tmp_path / "link") == b"a"
    with pytest.raises(OSError, match="is a symbolic link"):
        open_regular(tmp_path / "link", os.O_WRONLY | os.O_APPEND)


def test_a_log_behind_a_link_is_not_written_and_the_run_goes_on(tmp_path: Path) -> None:
    run, victim, said = tmp_path / "run", tmp_path / "victim", io.StringIO()
    run.mkdir()
    victim.write_text("a")
    for name in (LOG, JSONL):
        (run / name).symlink_to(victim)
    metrics = Metrics(run, logging=LoggingConfig(), train_iters=1, stream=said)
    metrics.log("one")
    metrics.log("two")
    metrics.close()
    assert "log.txt cannot be written any more" in said.getvalue() and "two" in said.getvalue()
    assert victim.read_text() == "a"


def test_temporary_files_are_not_written_through_links(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("a")
    own = f".{STATUS}.{socket.gethostname()}.{os.getpid()}.tmp"
    for name in (own, f"{JSONL}.tmp", LOOK):
        (run / name).symlink_to(victim)
    write_status(run, Status(state="done"))
    (run / JSONL).write_text('{"iteration": 3}\n')
    assert cut_metrics(run, 1) == 1
    with pytest.raises(OSError, match="is a symbolic link"), _opened(run / LOOK):
        pass
    (run / f"{JSONL}.cut-2").symlink_to(tmp_path / "new")
    (run / JSONL).write_text('{"iteration": 3}\n')
    with pytest.raises(FileExistsError):
        cut_metrics(run, 1)
    assert victim.read_text() == "a" and not (tmp_path / "new").exists()


def test_pipes_in_a_run_folder_are_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_status(run, Status(state="done", exit_code=0, iteration=3))
    (run / JSONL).write_text(json.dumps({"iteration": 3, "lm_loss": 1.0}) + "\n")
    for name in (STATUS, JSONL, LOG):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        assert main([str(run)]) == 0 and str(run) in capsys.readouterr().out
        assert (read_status(run) is None) == (name == STATUS)
        if name != JSONL:
            assert write_report(run, log=print).is_file()
            assert cut_metrics(run, 3) == 0
        else:
            with pytest.raises(OSError, match="not a regular file"):
                cut_metrics(run, 3)
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)
