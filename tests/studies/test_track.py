"""The communication track: its leaderboard, its committed rows, and an entry of one's own."""

from __future__ import annotations

import bz2
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.docs.documents import REPO, fences, python_fences
from tests.studies.files import row
from tools.bench.common.page_files import PAGE, RESULTS
from tools.bench.track import leaderboard, step_times
from tools.bench.track.iso_time import DenseLosses
from tools.bench.track.leaderboard import (
    RANKED_BY,
    SHORTER_GROUPS,
    SHORTER_TIER,
    SURE,
    EntryStanding,
    Target,
    as_markdown,
    check_commits,
    checked_rows,
    dense_losses,
    iso_gap,
    rounds_of,
    standings_of,
    target_of,
)
from tools.bench.track.rules import check_entries
from tools.bench.track.step_times import (
    FILE,
    TIER,
    StepTime,
    add_times,
    read_times,
    timed_runs,
)
from tools.studies.commands import Commands
from tools.studies.declaration import read_study
from tools.studies.rows import StudyRow, read_rows
from tools.studies.text_data import prepare

PAGE_OF_PATHS = REPO / "docs" / "extending.md"
STUDY = read_study(TIER)
COMMANDS = Commands(STUDY, Path("runs"), Path("data"))
ENTRY = "randomk_0.1-seed1"


def rows() -> list[StudyRow]:
    dense = [row("dense_bf16", seed, 4.0 + 0.01 * (seed % 2)) for seed in range(1, 9)]
    near = [row("dense_int8", seed, 4.02) for seed in (1, 2)]
    far = [row("powersgd_4", seed, 4.2, sent=10.0) for seed in (1, 2)]
    return [*dense, *near, *far]


def test_an_entry_reaches_the_target_by_the_sigma_of_the_baseline() -> None:
    target = target_of(read_study(TIER), rows())
    assert target is not None and target.seeds == 8
    assert target.loss == pytest.approx(4.055) and target.sigma == pytest.approx(0.005345, rel=1e-3)
    assert Target(loss=4.0, sigma=0.02, seeds=8).z_score([3.98, 3.99, 3.98, 3.99]) == pytest.approx(
        1.5
    )
    assert target_of(read_study(TIER), rows()[:1]) is None


def times(**seconds: float) -> dict[str, StepTime]:
    return {
        name: StepTime(entry=name, rounds=[9.0, value, 0.1], reported=1.0, counted=1.0, load=0.0)
        for name, value in seconds.items()
    }


def board(
    found: Sequence[StudyRow], at: Mapping[str, StepTime] | None = None
) -> list[EntryStanding]:
    by_rate = {} if at is None else {RANKED_BY: at}
    return standings_of(STUDY, COMMANDS, found, by_rate)


def test_entries_that_reach_the_target_are_ranked_by_the_time_of_a_run() -> None:
    fast = times(dense_bf16=6.0, dense_int8=3.0, powersgd_4=1.0, before_fp32=5.0)
    found = board(rows(), fast)
    assert [each.group.name for each in found] == ["dense_int8", "dense_bf16", "powersgd_4"]
    assert [each.reaches for each in found] == [True, True, False]
    assert all((each.z_score or 0.0) >= SURE for each in found[:2])
    # PowerSGD begins after 64 of 1,920 steps, which are dense in fp32.
    assert found[2].minutes[RANKED_BY] == pytest.approx((64 * 5.0 + 1856 * 1.0) / 60)
    assert not board(rows(), times(powersgd_4=1.0))[2].minutes


def test_times_have_the_range_of_their_rounds() -> None:
    fast = times(dense_bf16=6.0, dense_int8=3.0)
    assert [each[RANKED_BY]["dense_int8"].seconds for each in rounds_of({RANKED_BY: fast})] == [
        9.0,
        3.0,
        0.1,
    ]
    (int8,) = (each for each in board(rows(), fast) if each.group.name == "dense_int8")
    assert int8.minutes_spread == {RANKED_BY: pytest.approx(1920 * (9.0 - 0.1) / 2 / 60)}
    one = {name: replace(each, rounds=[1.0]) for name, each in fast.items()}
    assert not any(each.minutes_spread for each in board(rows(), one))


def test_rows_of_the_leaderboard_can_be_made_again() -> None:
    check_commits([row("dense_bf16", 1, 4.0)])
    for commit, words in (("", "no commit"), ("1a2b3c4-dirty", "1a2b3c4-dirty")):
        with pytest.raises(ConfigError, match=f"dense_bf16-seed1 has a row of {words}"):
            check_commits([replace(row("dense_bf16", 1, 4.0), commit=commit)])


def lengths_of_dense() -> list[StudyRow]:
    """Return rows of dense runs: half the steps lose 0.1 more, and seed 2 0.01 more."""
    return [
        replace(
            row("dense_bf16" if steps == 400 else f"{SHORTER_GROUPS}{steps}", seed, 5.0),
            steps=steps,
            valid_loss=5.0 + 0.1 * (400 / steps - 1) + 0.01 * (seed - 1),
        )
        for steps in (80, 160, 240, 400)
        for seed in (1, 2)
    ]


def test_dense_runs_of_other_lengths_are_interpolated_in_the_logarithm() -> None:
    losses = DenseLosses(lengths_of_dense(), dense="dense_bf16", shorter=SHORTER_GROUPS)
    assert losses.lengths == [80, 160, 240, 400] and losses.seeds == {1, 2}
    assert losses.at(400, 1) == 5.0 and losses.at(80, 2) == pytest.approx(5.41)
    between = losses.at((160 * 240) ** 0.5, 1)
    assert between == pytest.approx((losses.at(160, 1) + losses.at(240, 1)) / 2)
    with pytest.raises(ConfigError, match="no dense run is as short as 79 steps"):
        losses.at(79, 1)


def test_a_run_is_compared_with_dense_runs_of_its_own_seeds() -> None:
    dense = DenseLosses(lengths_of_dense(), dense="dense_bf16", shorter=SHORTER_GROUPS)
    gaps = dense.gaps({1: 5.05, 2: 5.06, 3: 9.0}, 160.0)
    assert gaps == {1: pytest.approx(-0.1), 2: pytest.approx(-0.1)}
    assert dense.gaps({1: 5.05}, 560.0) == {1: pytest.approx(0.05)}, "the whole dense run"


def test_a_missing_length_of_dense_is_named() -> None:
    found = [each for each in lengths_of_dense() if each.name != f"{SHORTER_GROUPS}160-seed2"]
    with pytest.raises(ConfigError, match="no dense run of 160 steps and seed 2"):
        DenseLosses(found, dense="dense_bf16", shorter=SHORTER_GROUPS)
    with pytest.raises(ConfigError, match="no finished run of dense_bf16"):
        DenseLosses([], dense="dense_bf16", shorter=SHORTER_GROUPS)


def test_an_entry_is_compared_with_a_dense_run_that_ends_when_it_does() -> None:
    runs = [("dense_bf16", 1, 4.0, 8), ("dense_bf16", 2, 4.2, 8)]
    runs += [("dense_steps_2", 1, 5.0, 2), ("dense_steps_2", 2, 5.2, 2)]
    lengths = [replace(row(name, seed, loss), steps=steps) for name, seed, loss, steps in runs]
    dense = DenseLosses(lengths, dense="dense_bf16", shorter=SHORTER_GROUPS)
    found = [iso_gap({1: 4.4, 3: 9.0}, length, dense) for length in (1.5, 4.0, 49.5)]
    assert found[0] is None, "no dense run is as short"
    # Four steps are halfway between two and eight in the logarithm.
    assert found[1:] == pytest.approx([4.4 - 4.5, 4.4 - 4.0])
    assert iso_gap({1: 4.4, 2: 4.8}, 2.0, dense) == pytest.approx(-0.5)
    assert iso_gap({3: 9.0}, 4.0, dense) is None
    assert iso_gap({1: 4.4}, 4.0, None) is None


def test_shorter_runs_are_the_baseline_but_for_their_length() -> None:
    whole = COMMANDS.config(next(run for run in STUDY.runs if run.group == STUDY.baseline))
    shorter = read_study(SHORTER_TIER)
    commands = Commands(shorter, Path("runs"), Path("data"))
    for run in shorter.runs:
        config = commands.config(run)
        assert config.training.train_iters == int(run.group.removeprefix(SHORTER_GROUPS))
        training = replace(config.training, train_iters=whole.training.train_iters)
        evaluation = replace(config.evaluation, eval_interval=whole.evaluation.eval_interval)
        alike = replace(config, training=training, evaluation=evaluation, run=whole.run)
        assert alike == whole, run.name
    assert shorter.vocabulary == STUDY.vocabulary


@pytest.mark.parametrize("tier", [SHORTER_TIER, SHORTER_TIER.with_name("rates_s.yaml")])
def test_studies_beside_the_tier_read_its_files_alone(tier: Path) -> None:
    study = read_study(tier)
    for run in study.runs:
        for name in ("train-data-path", "valid-data-path"):
            assert {f"{run.flags[name]}{end}" for end in (".bin", ".idx")} <= study.sha256.keys()
        assert run.flags["tokenizer-model"] in study.sha256
    assert study.sha256.items() <= STUDY.sha256.items()


def test_rows_of_shorter_runs_need_those_of_the_baseline(tmp_path: Path) -> None:
    study = read_study(SHORTER_TIER)
    digests = {run.name: Commands(study, Path("r"), Path("d")).digest(run) for run in study.runs}
    found = [
        replace(row(f"dense_steps_{steps}", 1, 5.0), steps=steps, settings=digests[name])
        for steps in (480, 720, 960, 1440)
        if (name := f"dense_steps_{steps}-seed1")
    ]
    results = tmp_path / "shorter.jsonl"
    results.write_text("".join(f"{each.line}\n" for each in found), encoding="utf-8")
    whole = [replace(row("dense_bf16", seed, 4.0), steps=1920) for seed in (1, 2)]
    dense = dense_losses(STUDY, whole, results)
    assert dense is not None and dense.lengths == [480, 720, 960, 1440, 1920]
    assert dense.seeds == {1}, "no shorter run of seed 2"
    fast = {RANKED_BY: times(dense_bf16=6.0, dense_int8=3.0, powersgd_4=1.0, before_fp32=7.0)}
    standings = standings_of(STUDY, COMMANDS, rows(), fast, dense)
    page = as_markdown(standings, target_of(STUDY, rows()), STUDY, dense)
    assert "runs of 480, 720, 960, 1440, 1920 steps, interpolated" in page.replace("\n", " ")
    # Half the time of a step is that of a dense run of 960 steps, which ended at 5.0.
    assert "| dense_int8 | 96.0 ±142.4 | -0.980" in page
    assert re.search(r"\| powersgd_4 \| 38.4 ±[0-9.]+ \|  \|", page), "no dense run is as short"
    unknown = {RANKED_BY: times(dense_int8=3.0)}
    assert not any(each.iso_gaps for each in standings_of(STUDY, COMMANDS, rows(), unknown, dense))
    assert dense_losses(STUDY, [row("dense_int8", 1, 4.0)], results) is None
    assert dense_losses(STUDY, rows(), tmp_path / "absent") is None
    failed = [replace(found[0], valid_loss=None), *found[1:]]
    for lacking in (found[1:], failed):
        results.write_text("".join(f"{each.line}\n" for each in lacking), encoding="utf-8")
        assert dense_losses(STUDY, whole, results) is None, "480 steps are missing"
    results.write_text(f"{replace(found[0], settings='0').line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="dense_steps_480-seed1 has a row of other settings"):
        dense_losses(STUDY, rows(), results)


@pytest.mark.parametrize(
    "left_out", ["dense_bf16-seed8", "dense_int8-seed2"], ids=["preliminary target", "one seed"]
)
def test_too_few_seeds_reach_nothing(left_out: str) -> None:
    found = {each.group.name: each for each in board([r for r in rows() if r.name != left_out])}
    assert not found["dense_int8"].reaches and (found["dense_int8"].z_score or 0.0) > 0


@pytest.mark.parametrize(
    ("seeds", "told"), [((1, 3), "1, 3"), ((2,), "2"), ((1, 2, 2), "1, 2, 2"), ((1, 2), "")]
)
def test_no_seed_is_left_out_or_repeated(seeds: tuple[int, ...], told: str) -> None:
    declared = {run.name: COMMANDS.digest(run) for run in STUDY.runs}
    names = [f"dense_bf16-seed{seed}" for seed in seeds]
    found = [
        replace(row("dense_bf16", seed, 4.0), settings=declared[name])
        for seed, name in zip(seeds, names, strict=True)
    ]
    if not told:
        assert checked_rows(STUDY, COMMANDS, found) == found
        return
    with pytest.raises(ConfigError, match=f"rows of dense_bf16: seeds {told}; must be 1, 2 and"):
        checked_rows(STUDY, COMMANDS, found)


def test_an_entry_with_a_failed_seed_does_not_reach_the_target() -> None:
    failed = row("dense_int8", 3, None)
    found = {each.group.name: each for each in board([*rows(), failed])}
    assert not found["dense_int8"].reaches and found["dense_int8"].group.failed == 1
    found = board([*rows(), row("dense_int4", 1, None)])
    assert found[-1].group.name == "dense_int4" and found[-1].z_score is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flags: {grad-wire: int8}", "flags: {num-layers: 8}", "dense_int8: model is not that of"),
        ("flags: {grad-wire: int8}", "flags: {eval-iters: 1}", "dense_int8: evaluation is not"),
        (
            "ranks: 4\n    seeds: [1, 2, 3, 4]\n    flags: {grad-wire: int8}",
            "ranks: 8\n    flags: {grad-wire: int8, tensor-model-parallel-size: 2}",
            "dense_int8: number of ranks is not that of dense_bf16",
        ),
        ("flags: {grad-wire: int8}", "tokens: 31457280", "dense_int8: number of steps is not"),
        (
            "seeds: [1, 2, 3, 4]\n    flags: {grad-wire: int8}",
            "seeds: [1, 3]",
            "dense_int8.seeds: must be 1, 2",
        ),
        (
            "flags: {grad-wire: int8}",
            "fork: {run: dense_bf16, step: 1919}",
            "dense_int8: fork is not that of dense_bf16",
        ),
        (", radius-start-iter: 320}", "}", "radius_0.4.flags: give the step with which the path"),
        (
            "flags: {grad-wire: int8}",
            "flags: {grad-wire: [int8, --load, runs/other, --finetune]}",
            "dense_int8: load is not that of dense_bf16",
        ),
        (
            "flags: {grad-wire: int8}",
            "tokens: null\n    flags: {grad-wire: int8, train-samples: 81920, micro-batch-size: 8, "
            "rampup-batch-size: [32, 32, 40960]}",
            "dense_int8: rampup-batch-size is not that of dense_bf16",
        ),
        (
            "samo-pruning: random",
            "samo-pruning: early-bird",
            "samo_0.9.flags: samo-pruning early-bird prunes after a step that is not known",
        ),
        ("powersgd-rank: 4,", "powersgd-rank: 4, lr: 1.0e-2, weight-decay: 0,", ""),
    ],
)
def test_entries_keep_the_rules(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "tier.yaml"
    # Without keep-last, with which no run may be forked from.
    text = TIER.read_text(encoding="utf-8").replace("  keep-last: 2\n", "")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    study = read_study(path)
    commands = Commands(study, Path("runs"), Path("data"))
    if not message:
        check_entries(study, commands)
        return
    with pytest.raises(ConfigError) as raised:
        check_entries(study, commands)
    assert message in str(raised.value)


def test_what_is_timed_begins_at_once_and_has_whole_cycles(tmp_path: Path) -> None:
    found = {each.name: each for each in timed_runs(STUDY, tmp_path)}
    assert {*STUDY.groups, "before_fp32", "before_bf16"} == found.keys()
    assert found["radius_0.4"].before == 11 and found["dense_int8"].before == 3
    (run,) = found["powersgd_4"].study.runs
    assert run.flags["powersgd-start-iter"] == 1
    (before,) = found["before_fp32"].study.runs
    assert "grad-wire" not in before.flags and "grad-path" not in before.flags
    path = tmp_path / "tier.yaml"
    text = TIER.read_text(encoding="utf-8")
    path.write_text(text.replace("radius-interval: 10,", "radius-interval: 40,"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"radius_0.4: its steps repeat after 40, which must"):
        timed_runs(read_study(path), tmp_path)


def test_the_committed_leaderboard_follows_from_the_rows(tmp_path: Path) -> None:
    study, folder = read_study(TIER), TIER.parent
    found = read_rows(leaderboard.RESULTS)  # its first rows come with the first runs
    assert all(set(each.scores) == {score.name for score in study.scores} for each in found)
    (tmp_path / PAGE).write_text((folder / PAGE).read_text("utf-8"), encoding="utf-8")
    assert leaderboard.main(["--out", str(tmp_path)]) == 0
    for name in (PAGE, RESULTS):
        assert (tmp_path / name).read_text("utf-8") == (folder / name).read_text("utf-8"), name


@pytest.mark.parametrize(
    ("tool", "flags", "words"),
    [
        (leaderboard.main, ["--results", "absent.jsonl"], "--results: absent.jsonl is no file"),
        (leaderboard.main, ["--shorter", "absent.jsonl"], "--shorter: absent.jsonl is no file"),
        (leaderboard.main, ["--times", "absent.json"], "--times: absent.json is no file"),
        (leaderboard.main, ["--times", str(TIER)], "no file of step times: JSONDecodeError"),
        (step_times.main, ["--entries", "powersgd"], "--entries powersgd: must be one of"),
        (step_times.main, ["--rounds", "0"], "--rounds 0: must be at least 1"),
    ],
)
def test_wrong_flags_are_one_line(
    tool: Callable[[list[str]], int],
    flags: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tool(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.full
def test_a_path_written_from_the_documents_enters_with_one_command(tmp_path: Path) -> None:
    repo = tmp_path / "repository"
    _copy_with_the_path(repo)
    _shorten_the_tier(repo / "tools" / "bench" / "track" / "tier_s.yaml")
    text, data, results = tmp_path / "text", tmp_path / "data", tmp_path / "rows.jsonl"
    _write_texts(text, data)
    environment = {**os.environ, "PYTHONPATH": str(repo)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=repo, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    prepare(text, data, vocabulary=300)
    (fence,) = [one for one in fences(PAGE_OF_PATHS, "text") if ENTRY in one]
    enters, shows = (
        line.replace("DATA", str(data)).replace("ROWS", str(results)).split()[1:]
        for line in fence.splitlines()
    )
    run(*enters)
    (found,) = read_rows(results)
    assert (found.name, found.exit_code, found.data_parallel) == (ENTRY, 0, 4)
    assert found.valid_loss is not None and 0.05 < (found.density or 0.0) < 0.2
    assert 0 < found.scores["bits_per_byte"] < 20 and 0 <= found.scores["blimp"] <= 1
    assert f"| randomk_0.1 | 1 | {found.valid_loss:.4f} |" in run(*shows)


def _copy_with_the_path(repo: Path) -> None:
    """Copy the program, and do in the copy what the page says."""
    for name in ("megatron", "radius", "samo", "tools", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "*.png", "*.jsonl")
        shutil.copytree(REPO / name, repo / name, ignore=ignored)
    for script in REPO.glob("pretrain_*.py"):
        shutil.copy(script, repo)
    first_half = PAGE_OF_PATHS.read_text("utf-8").split("\n## Write a task")[0]
    codes = [code for code in python_fences(PAGE_OF_PATHS) if code in first_half]
    (repo / "randomk.py").write_text("\n\n".join(codes), encoding="utf-8")
    program = repo / "pretrain_gpt.py"
    content = program.read_text(encoding="utf-8")
    for line, before in (
        ("from randomk import RandomKPath\n", "from samo.path"),
        ("        RandomKPath(),\n", "        DilocoPath(),"),
    ):
        assert line.strip() in first_half and content.count(before) == 1
        content = content.replace(before, line + before)
    program.write_text(content, encoding="utf-8")


def _shorten_the_tier(tier: Path) -> None:
    """Add the entry of the page, and take 30 steps of eight short sequences."""
    (entry,) = [text for text in fences(PAGE_OF_PATHS, "yaml") if "randomk_0.1:" in text]
    content = tier.read_text(encoding="utf-8") + entry
    for key, value in (
        ("vocabulary", 300),
        ("  seq-length", 16),
        ("  global-batch-size", 8),
        ("  eval-iters", 1),
        ("  save-interval", "none"),
        ("  keep-last", "none"),
        ("tokens", 3840),
    ):
        content, count = re.subn(rf"(?m)^{key}: .*$", f"{key}: {value}", content)
        assert count == 1, key
    content = re.sub(r"sha256:\n(  .*\n)+", "", content)
    # The other entries, which are checked too, begin in time.
    content = re.sub(r"-start-iter: \d+", "-start-iter: 0", content)
    tier.write_text(content, encoding="utf-8")


def _write_texts(text: Path, data: Path) -> None:
    text.mkdir()
    data.mkdir()
    words = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    for kind in ("train", "valid"):
        (text / f"{kind}.jsonl").write_text(json.dumps({"text": words}) + "\n", encoding="utf-8")
    line = {"paradigm": "order", "phenomenon": "order", "good": "It is here.", "bad": "It here is."}
    for name, content in (("valid.jsonl.bz2", {"text": words}), ("blimp-200.jsonl.bz2", line)):
        packed = bz2.compress((json.dumps(content) + "\n").encode())
        (data / name).write_bytes(packed)


def test_step_times_are_added_by_rate_and_entry(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    assert read_times(path) == {}
    add_times(path, "none", list(times(dense_bf16=1.0, dense_int8=2.0).values()))
    add_times(path, "1gbit", list(times(dense_bf16=3.0).values()))
    add_times(path, "none", list(times(dense_int8=4.0).values()))
    found = read_times(path)
    assert {rate: {n: t.seconds for n, t in by.items()} for rate, by in found.items()} == {
        "none": {"dense_bf16": 1.0, "dense_int8": 4.0},
        "1gbit": {"dense_bf16": 3.0},
    }
    for by_entry in read_times(FILE).values():
        for each in by_entry.values():
            # Reported bytes leave out losses and norms, and the headers of gloo's messages, which
            # are 1.7 kB for an all-reduce of four ranks, of whatever size.
            assert each.counted is None or 0 < each.counted - each.reported < 16_000, each
