"""`Metrics` as the trainer sees it: intervals, terminal, trackers that fail, cost of a step."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.config import LoggingConfig
from megatron.errors import ConfigError
from megatron.metrics import Evaluation, Metrics, NullMetrics, check_trackers, cut_metrics
from megatron.metrics.trackers import WANDB_ID, TimedRecord, evaluation_scalars, step_scalars
from tests.calls import count_calls

from .helpers import Clock, evaluated, lines_of, make_metrics, record


def _iterations(text: str) -> list[int]:
    return [int(line.split("/")[0].split()[-1]) for line in text.splitlines() if "/     " in line]


def test_lines_come_at_the_interval_and_at_the_last_step(tmp_path: Path) -> None:
    metrics, stream = make_metrics(tmp_path, log_interval=4, train_iters=10)
    for i in range(1, 11):
        metrics.step(record(i, train_iters=10))
    assert _iterations(stream.getvalue()) == [4, 8, 10]
    metrics.close()
    assert _iterations(stream.getvalue()) == [4, 8, 10]
    assert (tmp_path / "log.txt").read_text() == stream.getvalue()


def test_close_prints_an_unfinished_interval_once(tmp_path: Path) -> None:
    metrics, stream = make_metrics(tmp_path, log_interval=4)
    for i in range(1, 7):
        metrics.step(record(i))
    metrics.close()
    metrics.close()
    assert _iterations(stream.getvalue()) == [4, 6]
    assert len(lines_of(tmp_path)) == 6


def test_time_left_counts_evaluations_but_not_the_first_step(tmp_path: Path) -> None:
    clock = Clock()
    metrics, stream = make_metrics(tmp_path, clock=clock, log_interval=3)
    for i, seconds in ((1, 300.0), (2, 10.0), (3, 20.0)):  # the third holds 10 s of evaluation
        clock.now += seconds
        metrics.step(record(i, step_seconds=300.0 if i == 1 else 10.0))
    metrics.close()
    # 97 steps at (10 + 20) / 2 seconds.
    assert "ETA: 24m 15s (" in stream.getvalue()


def test_formula_is_named_once_with_the_peak(tmp_path: Path) -> None:
    metrics, stream = make_metrics(tmp_path, formula="6 N per token", peak_tflops=312.0)
    metrics.close()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("6 N per token") == 1 and "312 TFLOP/s" in log and stream.getvalue() == ""


def test_log_has_no_control_characters(tmp_path: Path) -> None:
    metrics, stream = make_metrics(tmp_path)
    metrics.log("plain\x1b[31m red\x1b[0m\r\x07\nnext\tline")
    metrics.close()
    assert stream.getvalue().endswith("] plain red\nnext\tline\n")
    assert (tmp_path / "log.txt").read_text() == stream.getvalue()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_bar_and_the_log_stays_plain(tmp_path: Path) -> None:
    terminal = _Terminal()
    metrics, _ = make_metrics(tmp_path, log_interval=2, train_iters=4, stream=terminal)
    for i in range(1, 5):
        metrics.step(record(i, train_iters=4, lm_loss=5.4321))
    metrics.log("between")
    metrics.close()
    shown = terminal.getvalue()
    assert "loss 5.4321" in shown and "4/4" in shown and "2.00 ktokens/s" in shown
    log = (tmp_path / "log.txt").read_text()
    assert "\r" not in log and "%|" not in log
    # Each plain line begins at the left edge, after the bar was wiped.
    for line in (" step 2/4 ", " step 4/4 ", log.splitlines()[-1]):
        before = shown[: shown.index(line)]
        assert before == "" or before[-1] in "\r\n" or before.endswith("\x1b[A")


def test_terminal_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    class Gone(_Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    metrics, _ = make_metrics(tmp_path, log_interval=1, stream=Gone())
    metrics.step(record(1))
    metrics.log("still here")
    metrics.close()
    assert "still here" in (tmp_path / "log.txt").read_text()
    assert len(lines_of(tmp_path)) == 1


def test_terminal_without_unicode_shows_something(tmp_path: Path) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    metrics, _ = make_metrics(tmp_path, stream=stream)
    metrics.log("naïve")
    metrics.close()
    assert b"na\\xefve" in raw.getvalue()
    assert "naïve" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_stdout_gets_a_few_settings_a_terminal_short_lines_and_the_log_all(tmp_path: Path) -> None:
    def run(folder: Path, stream: io.StringIO) -> str:
        metrics, _ = make_metrics(
            folder, log_interval=2, stream=stream, bar=False, formula="6 N per token"
        )
        metrics.log("every setting\n" * 100, brief="a few settings")
        for i in range(1, 5):
            metrics.step(record(i, skipped=i == 3))
        metrics.evaluation(evaluated(4, "valid", 5.0))
        metrics.close()
        return stream.getvalue()

    piped = run(tmp_path / "piped", io.StringIO())
    shown = run(tmp_path / "shown", _Terminal())
    log = (tmp_path / "shown" / "log.txt").read_text()
    assert log == (tmp_path / "piped" / "log.txt").read_text()
    assert "every setting" in log and log.count("number of nan iterations") == 2
    assert "a few settings" not in log and "6 N per token" in log
    assert piped.splitlines()[0].endswith("] a few settings")
    assert piped.splitlines()[1:] == log.splitlines()[-3:]
    _, *lines = shown.splitlines()
    assert max(map(len, lines)) < 120 and "6 N per token" not in shown
    assert lines[0] == (
        " step   2/100 | loss 5.0000 | lr 1.00e-04 | grad norm 1.250 | 500.0 ms/step | "
        "2.00 ktokens/s | ETA 0s"
    )
    assert "| skipped 1 |" in lines[1]
    assert lines[2].endswith("] validation loss at step 4: 5.0000, perplexity 148.4")


def test_what_takes_long_is_told_on_stdout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.busy.SECONDS", 1e-3)
    metrics, stream = make_metrics(tmp_path)
    with metrics.busy("save\x1b[2J"):
        while not re.match(r" save: \d+ s so far\n", stream.getvalue()):
            time.sleep(1e-3)
    told = stream.getvalue()
    time.sleep(5e-3)
    metrics.close()
    assert stream.getvalue() == told and not (tmp_path / "log.txt").exists()


def test_null_metrics_has_all_methods_and_does_nothing(tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    null = NullMetrics()
    public = [name for name in vars(Metrics) if not name.startswith("_")]
    assert set(public) <= set(vars(NullMetrics))
    null.log("x")
    null.step(record(1))
    null.evaluation(evaluated(1, "valid", 1.0))
    null.flush()
    null.close()
    assert sorted(os.listdir(tmp_path)) == before


def test_a_step_costs_little(tmp_path: Path) -> None:
    metrics, _ = make_metrics(tmp_path, log_interval=10_000, train_iters=20_000)
    records = [record(i, train_iters=20_000, step_seconds=1e-6) for i in range(1, 3001)]
    for start in range(0, 3000, 500):
        with count_calls() as calls:
            for step in records[start : start + 500]:
                metrics.step(step)
        assert calls() < 15 * 500, f"nine calls a step, also after {start} steps"
    assert not list(tmp_path.iterdir()), "nothing is written before the interval ends"
    metrics.close()


# ---- trackers ------------------------------------------------------------------------------------


def test_curves_have_megatrons_names() -> None:
    quiet = step_scalars(record(3, num_zeros=7, params_norm=9.0), LoggingConfig())
    megatrons = "learning-rate batch-size loss-scale grad-norm num-zeros params-norm".split()
    assert set(megatrons) | {"lm loss"} < set(quiet)
    assert not [name for name in quiet if name.startswith("mem-") or name.endswith("time")]
    flags = LoggingConfig(
        log_memory_to_tensorboard=True,
        log_timers_to_tensorboard=True,
        log_throughput=True,
        log_validation_ppl_to_tensorboard=True,
    )
    loud = step_scalars(record(3, timers={"forward": (0.1, 0.2)}), flags)
    assert loud["forward-time"] == 0.2 and loud["iteration-time"] == 0.5
    assert loud["mem-max-allocated-bytes"] == 2**30 and loud["throughput"] == 1.0
    assert evaluation_scalars(evaluated(1, "valid", 2.0), flags) == {
        "lm loss validation": 2.0,
        "lm loss validation ppl": math.exp(2.0),
    }
    assert evaluation_scalars(evaluated(1, "test", 2.0), LoggingConfig()) == {"lm loss test": 2.0}


def test_timers_are_seconds_per_step_in_trackers_and_files(tmp_path: Path) -> None:
    flags = {"log_interval": 4, "log_timers_to_tensorboard": True}
    metrics, _ = make_metrics(tmp_path, **flags)
    scalars: list[dict[str, float]] = []

    class Scalars(_Recorder):
        def steps(self, records: Sequence[TimedRecord]) -> None:
            for _, step, count in records:
                scalars.append(step_scalars(step, LoggingConfig(**flags), steps=count))

    metrics._trackers.append(Scalars())
    for i in range(1, 9):
        metrics.step(record(i, timers={} if i % 4 else {"forward": (2.0, 4.0)}))
    metrics.close()
    assert [of_step.get("forward-time") for of_step in scalars] == 2 * [None, None, None, 1.0]
    assert [line["seconds/forward"] for line in lines_of(tmp_path)[3::4]] == [1.0, 1.0]


class _Broken:
    name = "Broken"

    def __init__(self) -> None:
        self.calls = 0

    def steps(self, records: Sequence[TimedRecord]) -> None:
        self.calls += 1
        raise RuntimeError("tracker is down")

    def evaluation(self, evaluation: Evaluation, **_: object) -> None:
        self.calls += 1
        raise KeyError("x")

    def close(self) -> None:
        self.calls += 1
        raise OSError("no")


class _Recorder(_Broken):
    name = "Recorder"

    def steps(self, records: Sequence[TimedRecord]) -> None:
        self.calls += len(records)

    def evaluation(self, evaluation: Evaluation, **_: object) -> None:
        self.calls += 100


def test_tracker_that_fails_is_dropped_with_one_notice(tmp_path: Path) -> None:
    metrics, stream = make_metrics(tmp_path, log_interval=1)
    broken, recorder = _Broken(), _Recorder()
    metrics._trackers += [broken, recorder]
    metrics.step(record(1))
    metrics.step(record(2))
    metrics.evaluation(evaluated(2, "valid", 1.0))
    metrics.close()
    assert (broken.calls, recorder.calls) == (1, 103)
    assert stream.getvalue().count("Broken failed (RuntimeError: tracker is down)") == 1
    assert len(lines_of(tmp_path)) == 3


def test_tracker_that_cannot_start_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("not logged in")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse, __spec__=object()))
    metrics, stream = make_metrics(tmp_path, wandb_project="p")
    metrics.step(record(1))
    metrics.close()
    assert "wandb failed (RuntimeError: not logged in)" in stream.getvalue()


class Wandb(SimpleNamespace):
    """The package wandb, which notes each call."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, object]] = []
        super().__init__(__spec__=object())

    def init(self, **options: object) -> Wandb:
        self.seen.append(("init", options))
        return self

    def log(self, values: object, step: int) -> None:
        self.seen.append((step, values))

    def finish(self) -> None:
        self.seen.append(("end", 0))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_wandb_gets_project_name_folder_and_curves(tmp_path: Path, wandb: Wandb) -> None:
    metrics, _ = make_metrics(
        tmp_path,
        wandb_project="p",
        wandb_entity="team",
        name="gpt_tiny",
        summary={"lr": 0.1},
        log_interval=1,
    )
    metrics.step(record(1))
    metrics.evaluation(evaluated(1, "valid", 2.0))
    metrics.close()
    run_id = (tmp_path / WANDB_ID).read_text().strip()
    options = {"project": "p", "entity": "team", "name": "gpt_tiny", "dir": str(tmp_path)}
    options |= {"config": {"lr": 0.1}, "id": run_id, "resume": "allow"}
    assert len(run_id) == 8 and wandb.seen[0] == ("init", options)
    assert wandb.seen[1] == (1, step_scalars(record(1), LoggingConfig()))
    assert wandb.seen[2:] == [(1, {"lm loss validation": 2.0}), ("end", 0)]


def test_a_resumed_run_goes_on_at_wandb_and_logs_nothing_twice(
    tmp_path: Path, wandb: Wandb
) -> None:
    """The first start ends after step 4 without a word; the second goes on from step 2."""
    for first, evaluations in (1, [3]), (3, [3, 6]):
        metrics, _ = make_metrics(tmp_path, wandb_project="p", start_iteration=first - 1)
        for i in range(first, first + 4):
            metrics.step(record(i))
            if i in evaluations:
                metrics.evaluation(evaluated(i, "valid", 2.0))
        metrics.evaluation(evaluated(first + 3, "test", 2.0))
        metrics.flush()
        cut_metrics(tmp_path, 2)
    (_, one), (_, two) = (call for call in wandb.seen if call[0] == "init")
    assert one["id"] == two["id"]  # type: ignore[index]
    steps = [at for at, values in wandb.seen if at != "init" and "lm loss" in values]  # type: ignore[operator]
    assert steps == [1, 2, 3, 4, 5, 6]
    others = [at for at, values in wandb.seen if at != "init" and "lm loss" not in values]  # type: ignore[operator]
    assert others == [3, 4, 6, 6]
    make_metrics(tmp_path, wandb_project="p")
    assert wandb.seen[-1][1]["id"] != one["id"], "a run that begins again"  # type: ignore[index]
    (tmp_path / WANDB_ID).write_text("two words\n")
    _, stream = make_metrics(tmp_path, wandb_project="p", start_iteration=2)
    assert f"{WANDB_ID} holds no id of a run; remove the file" in stream.getvalue()


@pytest.mark.parametrize(
    ("flag", "package"), [("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")]
)
def test_missing_package_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, flag: str, package: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_trackers(LoggingConfig())
    with pytest.raises(ConfigError, match=rf"{package}: not installed.*sparsetron\[log\]"):
        check_trackers(replace(LoggingConfig(), **{flag: "x"}))


def _points(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return what TensorBoard shows of a curve."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_writes_its_curves(tmp_path: Path) -> None:
    folder = tmp_path / "tb"
    metrics, _ = make_metrics(
        tmp_path, log_interval=2, tensorboard_dir=str(folder), tensorboard_log_interval=2
    )
    for i in range(1, 5):
        metrics.step(record(i, lm_loss=10.0 - i))
    metrics.evaluation(evaluated(4, "valid", 3.0))
    metrics.close()
    assert _points(folder, "lm loss") == [(2, 8.0), (4, 6.0)]
    assert _points(folder / "samples", "lm loss vs samples") == [(16, 8.0), (32, 6.0)]
    assert _points(folder, "lm loss validation") == [(4, 3.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_hides_the_points_that_it_makes_again_and_no_others(tmp_path: Path) -> None:
    folder, samples = tmp_path / "tb", tmp_path / "tb" / "samples"

    def start(after: int, last: int, loss: float, *, only_evaluates: bool = False) -> None:
        metrics, _ = make_metrics(
            tmp_path,
            tensorboard_dir=str(folder),
            start_iteration=after,
            start_samples=8 * after,
            only_evaluates=only_evaluates,
        )
        for i in range(after + 1, last + 1):
            metrics.step(record(i, lm_loss=loss))
        metrics.evaluation(evaluated(max(after, last), "valid", loss))
        metrics.close()

    start(0, 6, 3.0)
    start(4, 5, 2.0)
    losses = [(1, 3.0), (2, 3.0), (3, 3.0), (4, 3.0), (5, 2.0)]
    for _ in range(2):
        assert _points(folder, "lm loss") == losses
        assert _points(samples, "lm loss vs samples") == [(8 * i, loss) for i, loss in losses]
        # A start that only evaluates hides nothing, and its points are at the samples of its step.
        start(3, 0, 7.0, only_evaluates=True)
    assert (24, 7.0) in _points(samples, "lm loss validation vs samples")
    assert (3, 7.0) in _points(folder, "lm loss validation")
