"""Tests of `pretrain_gpt.py` as a user starts it: alone, under torchrun and under mpiexec.

Most runs are forks of a process that has imported torch, see `tests.program`. One run compares them
with cold starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron import pretrain
from megatron.config import resolve
from megatron.data.vocabulary import Vocabulary
from megatron.report.drawing import can_draw
from megatron.status import Status, read_status, write_status
from megatron.tasks.gpt import LoadedGPT
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from tests import program
from tests.config.helpers import read
from tests.faults.starting import LONG_TIMEOUT, start_ranks
from tests.limits import LIMIT
from tests.program import REPO, WITHOUT_PICTURES
from tests.training.harness import NO_DROPOUT, TINY, metrics_of

CONFIGS = REPO / "configs"
SCRIPT = str(REPO / "pretrain_gpt.py")
MARKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "PMI_", "OMPI_", "TORCHELASTIC_")


def environment(*, pictures: bool = False) -> dict[str, str]:
    """Return an environment without a launcher's variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(MARKS)}
    path = str(REPO) if pictures else f"{WITHOUT_PICTURES}:{REPO}"
    return env | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(*command: str, cwd: Path, pictures: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in its own folder, cold."""
    env = environment(pictures=pictures)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT)


def alone(flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the program in its own folder, as a fork."""
    return program.run(SCRIPT, flags.split(), env=environment(), cwd=cwd)


@pytest.mark.push
def test_a_process_may_open_as_many_files_as_the_machine_grants(tmp_path: Path) -> None:
    """A blend of 93 prefixes needs more than the usual 1024."""
    code = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))\n"
        "from megatron.pretrain import begin\n"
        "begin()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
    )
    done = start(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_last_line_of_a_run_that_left_says_what_the_same_command_does() -> None:
    for flags, step, line in (
        ("", 3, "saved step 3 (STOP); the same command resumes the run"),
        ("--no-save-optim", 3, "saved step 3 (STOP) without the state of the optimizer"),
        ("", 0, "left before step 1 (STOP); the same command begins again"),
        ("--skip-train", 3, "left the evaluation (STOP); the same command evaluates again"),
    ):
        assert pretrain.told_of_leaving(read(*flags.split()), step, "STOP") == line


def test_an_interrupt_while_starting_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "run", interrupted)
    flags = [*TINY.split(), "--run-dir", str(tmp_path)]
    assert pretrain.pretrain(GPT_TASK, GRADIENT_PATHS, flags) == 130
    assert capsys.readouterr().err == "interrupted while starting\n"


@pytest.mark.push
def test_an_interrupt_ends_a_start_that_hashes_a_checkpoint(tmp_path: Path) -> None:
    """Hashing may take long, and no watchdog counts a second Ctrl-C yet."""
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import os, signal, sys\n"
        "import megatron.checkpoint.find as find\n"
        "from megatron.pretrain import leave, pretrain\n"
        "from pretrain_gpt import GPT_TASK, GRADIENT_PATHS\n"
        "find.locate_checkpoint = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
        "leave(pretrain(GPT_TASK, GRADIENT_PATHS, sys.argv[1:]))"
    )
    flags = [*TINY.split(), "--run-dir", "run"]
    done = program.run(script, flags, env=environment(), cwd=tmp_path)
    assert done.returncode == 130 and done.stderr.endswith("interrupted while starting\n")
    status = read_status(tmp_path / "run")
    assert status is not None and (status.state, status.exit_code) == ("failed", 130)


@pytest.mark.push
def test_alone_with_the_default_run_folder(tmp_path: Path) -> None:
    done = alone(TINY, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "gpt"
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml", "metrics.jsonl", "log.txt", "status.json", "checkpoints",
        "report.html", "environment.json",
    } <= names  # fmt: skip
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["iteration"]) == ("done", 0, 8)
    assert "lm loss" in done.stdout and "lm loss" in (folder / "log.txt").read_text()
    assert status["throughput"]["steps"] == 7 and "] throughput: " in done.stdout
    assert "training_days" in status["throughput"]
    facts = json.loads((folder / "environment.json").read_text())
    found = {name: facts[name] for name in ("ranks", "nodes", "threads", "backend", "network")}
    assert found == {"ranks": 1, "nodes": 1, "threads": 1, "backend": "gloo", "network": "none"}
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first == {"iteration": 0, **found}
    report = (folder / "report.html").read_text()
    assert "mean step" in report and "AxoNN, Eq. 2" not in report  # for so small a model


@pytest.mark.push
def test_an_evaluation_leaves_the_records_of_an_unfinished_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert alone(f"{TINY} --exit-interval 4 --run-dir run", tmp_path).returncode == 0
    # As a crash leaves them: a failure, a step after the checkpoint, and part of a line.
    failed = Status(state="failed", exit_code=6, reason="killed", iteration=5, attempt="a")
    write_status(run, failed)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    later = [lines[-1].replace('"iteration": 4', '"iteration": 5'), lines[-1][:30]]
    (run / "metrics.jsonl").write_text("\n".join([*lines, *later]))
    done = alone(f"{TINY} --skip-train --run-dir run", tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_status(run) == failed
    *old, valid, test = (run / "metrics.jsonl").read_text().splitlines()
    assert old == [*lines, *later]
    assert json.loads(valid)["valid_loss"] and json.loads(test)["test_loss"]
    assert not list(run.glob("metrics.jsonl.cut-*"))
    # The failure of an evaluation is told and recorded.
    (manifest,) = run.glob("checkpoints/*/manifest.json")
    manifest.write_text("{}")
    done = alone(f"{TINY} --skip-train --run-dir run", tmp_path)
    assert done.returncode == 4 and "no checkpoint in it verifies" in done.stderr
    status = read_status(run)
    assert status is not None and (status.state, status.exit_code) == ("failed", 4)
    assert status.attempt != "a"
    # A folder without a status gets one.
    done = alone(f"{TINY} --skip-train --run-dir new", tmp_path)
    status = read_status(tmp_path / "new")
    assert done.returncode == 0 and status is not None and status.state == "done"


@pytest.mark.push
def test_saved_configuration_repeats_the_run_bit_by_bit(tmp_path: Path) -> None:
    assert alone(f"{TINY} --run-dir first", tmp_path).returncode == 0
    again = alone("--config first/config.yaml --run-dir second", tmp_path)
    assert again.returncode == 0, again.stderr
    assert metrics_of(tmp_path / "first") == metrics_of(tmp_path / "second")


@pytest.mark.push
def test_torchrun_and_mpiexec_and_alone_give_one_curve(tmp_path: Path) -> None:
    """Three cold starts, and a fork that computes the same bits and writes the same report."""
    flags = f"{TINY} {NO_DROPOUT}".split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start(*torchrun, SCRIPT, *flags, "--run-dir", "torchrun", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pytest.importorskip("mpi4py", reason="needs the extra mpi")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpiexec, "mpi4py is here, mpiexec is not"
    done = start(
        mpiexec, "-n", "2", sys.executable, SCRIPT, *flags, "--run-dir", "mpiexec", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    done = start(sys.executable, SCRIPT, *flags, "--run-dir", "alone", cwd=tmp_path, pictures=True)
    assert done.returncode == 0, done.stderr
    curve = metrics_of(tmp_path / "mpiexec")
    assert curve == metrics_of(tmp_path / "torchrun")
    assert curve == pytest.approx(metrics_of(tmp_path / "alone"), abs=1e-4)
    assert alone(f"{TINY} {NO_DROPOUT} --run-dir forked", tmp_path).returncode == 0
    assert metrics_of(tmp_path / "forked") == metrics_of(tmp_path / "alone")
    cold, forked = (set(files_of(tmp_path / name)) for name in ("alone", "forked"))
    assert cold - forked == ({"loss.png"} if can_draw() else set()) and forked <= cold
    headings = [re.findall("<h2>.*?</h2>", report_of(tmp_path / x)) for x in ("alone", "forked")]
    assert headings[0] == headings[1] != []


def files_of(run: Path) -> list[str]:
    return [str(path.relative_to(run)) for path in run.rglob("*")]


def report_of(run: Path) -> str:
    return (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.push
@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--hiden-size 64", 2, ["--hiden-size", "--hidden-size"]),
        (f"{TINY} --lr nan", 2, ["lr", "nan"]),
        (f"{TINY} --grad-path topk2", 2, ["topk2", "dense"]),
        (f"{TINY} --num-attention-heads 5", 2, ["32", "5"]),
        ("--config nowhere.yaml", 2, ["nowhere.yaml"]),
        (TINY.replace("--mock-data", "--data-path nowhere"), 3, ["nowhere"]),
        (f"{TINY} --load nowhere", 4, ["nowhere", "no checkpoint"]),
        (f"{TINY} --device cuda", 2, ["cuda"]),
        (f"{TINY} --vocab-size 1 --tensor-model-parallel-size 2", 2, ["vocab_size 1", "2"]),
    ],
)
def test_a_mistake_is_one_line_and_its_exit_code(
    tmp_path: Path, flags: str, code: int, words: list[str]
) -> None:
    failed = alone(f"{flags} --run-dir here", tmp_path)
    assert failed.returncode == code, failed.stderr
    (line,) = failed.stderr.splitlines()
    assert all(word in line for word in words), line
    if (tmp_path / "here").exists():
        status = json.loads((tmp_path / "here" / "status.json").read_text())
        assert (status["state"], status["exit_code"], status["reason"]) == ("failed", code, line)


@pytest.mark.push
def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    failed = alone(f"{TINY} --lr nan --debug", tmp_path)
    assert failed.returncode == 2 and "Traceback" in failed.stderr


@pytest.mark.push
def test_a_wrong_flag_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, pretrain_gpt; code = pretrain_gpt.main(['--hiden-size', '3']);"
        "print(code, 'torch' in sys.modules)"
    )
    answer = start(sys.executable, "-c", code, cwd=tmp_path)
    assert answer.stdout.split() == ["2", "False"], answer.stderr


@pytest.mark.push
def test_a_run_that_does_not_compile_loads_no_compiler(tmp_path: Path) -> None:
    """A compiler takes as long to load as everything else that a rank loads."""
    code = (
        f"import sys, pretrain_gpt; code = pretrain_gpt.main({TINY.split()});"
        "print(code, 'torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    answer = start(sys.executable, "-c", code, cwd=tmp_path)
    assert answer.stdout.splitlines()[-1] == "0 True False", answer.stderr


@pytest.mark.parametrize(
    ("device", "flags", "compiled"),
    [("cpu", "", 0), ("cpu", "--compile", 2), ("cuda", "--compile false", 0), ("cuda", "", 2)],
)
def test_each_chunk_of_a_stage_is_compiled_as_chosen(
    device: str, flags: str, compiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    chunk = SimpleNamespace(compile_layers=lambda **given: calls.append(given))
    monkeypatch.setattr("megatron.model.gpt.GPT", lambda *_, **__: chunk)
    monkeypatch.setattr("megatron.config.compilation.find_spec", lambda _: "a module")
    monkeypatch.setattr("megatron.config.compilation.finds_compiler", lambda: True)
    stages = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    sizes = "--num-layers 4 --global-batch-size 4"
    config = resolve(read(*f"{sizes} {stages} {flags}".split()), 2)
    opened = LoadedGPT(GPT_TASK, config, Vocabulary(size=32))
    groups: Any = SimpleNamespace(pp=SimpleNamespace(rank=0, size=2), tp=None)
    place: Any = SimpleNamespace(type=device)
    assert len(opened.chunks(groups, place)) == 2
    assert calls == [{"options": {"fallback_random": True}}] * compiled


@pytest.mark.push
def test_a_dry_run_of_48_ranks_needs_neither_them_nor_mpi_nor_torch(tmp_path: Path) -> None:
    flags = ["--config", str(CONFIGS / "gpt_12b.yaml"), "--mock-data", "--dry-run"]
    code = (
        "import os, sys; sys.modules['mpi4py'] = None;"
        "os.environ.update(RANK='0', WORLD_SIZE='48', LOCAL_RANK='0');"
        f"import pretrain_gpt; code = pretrain_gpt.main({flags});"
        "print('code', code, 'torch' in sys.modules)"
    )
    answer = start(sys.executable, "-c", code, cwd=tmp_path)
    assert answer.stdout.endswith("code 0 False\n"), answer.stderr
    assert "recompute_num_layers: 8\n" in answer.stdout and not list(tmp_path.iterdir())


@pytest.mark.push
def test_no_rank_waits_for_one_that_found_a_mistake(tmp_path: Path) -> None:
    """A rank that waited would wait for the timeout, which is longer than this test waits."""
    flags = f"--train-iters 4 --mock-data false --data-path nowhere {LONG_TIMEOUT}"
    ended = start_ranks(2, tmp_path / "here", flags).finish()
    assert ended.codes == [3, 3]
    assert sum("nowhere.idx" in line for line in ended.all_stderr.splitlines()) == 1
    assert ended.status["exit_code"] == 3


def test_help_is_complete_and_needs_nothing(tmp_path: Path) -> None:
    shown = start(sys.executable, SCRIPT, "--help", cwd=tmp_path)
    assert shown.returncode == 0
    for flag in ("--num-layers", "--grad-path", "--eval-at-start", "--run-dir", "--help-compat"):
        assert flag in shown.stdout
    assert alone("--help-compat", tmp_path).returncode == 0
