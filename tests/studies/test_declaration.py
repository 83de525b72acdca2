"""A study file declares runs by name; what is wrong in it is refused by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.studies.files import NAMES, write_study
from tools.studies.commands import Commands
from tools.studies.declaration import Fork, read_study
from tools.studies.execution import Execution, Launcher

FORK = "    fork: {run: dense, step: 4}\n"


def commands_of(path: Path) -> Commands:
    return Commands(read_study(path), path.parent / "runs", path.parent / "data")


def test_a_grid_makes_a_run_of_each_value_and_seed(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path))
    assert [run.name for run in study.runs] == NAMES
    assert study.groups == ("dense", "dense_bf16", "dense_int4") and study.baseline == "dense"
    assert study.pairs == (("dense_int4", "dense_bf16"),)
    run = study.run("dense_int4-seed2")
    assert (run.ranks, run.seed, run.fork) == (2, 2, Fork(run="dense", step=4))
    assert run.flags["grad-wire"] == "int4" and run.base == "dense-seed2"


def test_grids_multiply_and_may_hold_lengths(tmp_path: Path) -> None:
    changes = (
        ("grid: {grad-wire: [bf16, int4]}", "grid: {grad-wire: [bf16, int4], tokens: [640, 1280]}"),
        ('"dense_{grad-wire}"', '"dense_{grad-wire}_{tokens}"'),
        ("pairs: [[dense_int4, dense_bf16]]\n", ""),
    )
    path = write_study(tmp_path, *changes)
    study = read_study(path)
    assert study.groups[1:] == tuple(
        f"dense_{w}_{t}" for w in ("bf16", "int4") for t in (640, 1280)
    )
    assert commands_of(path).steps(study.run("dense_bf16_1280-seed1")) == 20


def test_a_name_of_a_grid_stands_for_several_flags(tmp_path: Path) -> None:
    grid = "rate: {x1: {}, x2: {lr: 2.0e-3, min-lr: 2.0e-4}}, grad-wire: [bf16]"
    changes = (
        ("grid: {grad-wire: [bf16, int4]}", f"grid: {{{grid}}}"),
        ('"dense_{grad-wire}"', '"dense_{grad-wire}-{rate}"'),
        ("pairs: [[dense_int4, dense_bf16]]\n", ""),
    )
    study = read_study(write_study(tmp_path, *changes))
    assert study.groups == ("dense", "dense_bf16-x1", "dense_bf16-x2")
    first, second = (study.run(f"dense_bf16-{rate}-seed1").flags for rate in ("x1", "x2"))
    assert (first["lr"], second["lr"], second["min-lr"]) == (1e-3, 2e-3, 2e-4)
    assert second["grad-wire"] == "bf16" and "rate" not in second
    path = write_study(tmp_path, (changes[0][0], changes[0][1].replace("min-lr", "grad_wire")))
    text = path.read_text(encoding="utf-8").replace('"dense_{grad-wire}"', '"{grad-wire}{rate}"')
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"grid\.grad-wire\.bf16: the grid gives grad-wire twice"):
        read_study(path)


def test_a_run_may_have_a_baseline_of_its_own(tmp_path: Path) -> None:
    own = ("    ranks: 2", "    ranks: 2\n    baseline: dense_bf16")
    study = read_study(write_study(tmp_path, own))
    own_baselines = {"dense_bf16": "dense_bf16", "dense_int4": "dense_bf16"}
    assert study.baselines == {"dense": "dense", **own_baselines}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: ", "titel: ", "titel: no such key; did you mean title?"),
        (
            "    ranks: 2",
            "    rank: 2",
            "runs.dense_{grad-wire}.rank: no such key; did you mean rank",
        ),
        ("    ranks: 2", "    ranks: two", "runs.dense_{grad-wire}.ranks: two; must be a whole"),
        ("    ranks: 2", "    ranks: 0", "ranks: 0; must be a whole number, at least 1"),
        ("[1, 2]", "[1, 1]", "seeds: must be a list of different whole numbers"),
        ("[1, 2]", "3", "seeds: must be a list"),
        (
            "baseline: dense",
            "baseline: dens",
            "baseline: no run is named dens; did you mean dense?",
        ),
        (
            "    ranks: 2",
            "    baseline: dens",
            "runs.dense_bf16.baseline: no run is named dens; did you mean dense?",
        ),
        (
            "{grad-wire: [bf16, int4]}",
            "{grad-wire: {bf16: {seed: 1}}}",
            "grid.grad-wire.bf16.seed: the study sets it for each run",
        ),
        ("[[dense_int4, dense_bf16]]", "[[dense_int4]]", "pairs[0]: must be a list of two runs"),
        ("dense_int4,", "dense_int3,", "pairs[0]: no run is named dense_int3; did you mean"),
        ("run: dense,", "run: dence,", "fork.run: no run is named dence; did you mean dense?"),
        ("run: dense, step: 4", "run: dense", "runs.dense_{grad-wire}.fork.step: is missing"),
        ("run: dense,", "run: dense_bf16,", "dense_bf16 is a fork itself"),
        ("bf16, int4]}", "bf16, int4], lr: [1, 2]}", "the name must hold {lr}"),
        ("grid: {grad-wire: [bf16, int4]}", "grid: {grad-wire: bf16}", "grad-wire: must be a list"),
        ('"dense_{grad-wire}"', '"a b {grad-wire}"', "'a b bf16' is no name of a folder"),
        ("  dense: {}", "  dense: {}\n  dense: {}", "dense is given twice"),
        ("  dense: {}", "  dense: 3", "runs.dense: must be a mapping"),
        ("mock-data: true", "seed: 3", "flags.seed: the study sets it for each run"),
        ("mock-data: true", "mock-data: {a: 1}", "flags.mock-data: must be a value, or a list"),
        ("tokens: 640", "tokens: [640]", "tokens: [640]; must be a whole number"),
        ("title: Does", "title: [Does", "not YAML"),
        ("seeds: [1, 2]", "seeds: [2024-99-99]", "not YAML"),
        ("tokens: 640", f"tokens: {'6' * 5000}", "not YAML"),
        ("tokens: 640", "tokens: !!int six", "not YAML"),
        ("  dense: {}", "  dense: !!map six", "not YAML"),
        ("  dense: {}", "  dense: false", "runs.dense: must be a mapping"),
        (
            "mock-data: true",
            "mock-data: true\n  mock_data: true",
            "flags.mock_data: is given twice",
        ),
        ("    ranks: 2", "    flags: {grad-wire: fp32}", "flags.grad-wire: the grid gives it too"),
        ("baseline: dense", "reference: dense", "reference: dense runs on one rank"),
        ("mock-data: true", "help: true", "flags.help: the run would not train"),
        ("runs:", "scores: {b: {task: blimp, file: f}}\nruns:", "scores.b.figure: is missing"),
        (
            "runs:",
            "scores: {b: {tasks: blimp}}\nruns:",
            "scores.b.tasks: no such key; did you mean",
        ),
        ("runs:", "sha256: {f: 12}\nruns:", "sha256.f: must be 64 hexadecimal digits"),
        (
            "runs:",
            "scores: {b: {task: blim, file: f, figure: accuracy}}\nruns:",
            "scores.b.task: blim; did you mean blimp?",
        ),
        *(
            (
                "runs:",
                f"scores: {{'{name}': {{task: blimp, file: f, figure: accuracy}}}}\nruns:",
                f"scores.{name}: '{name}' is no name of a score; use letters, digits, . _ -",
            )
            for name in ("a/b", "..", "", "a|b")
        ),
        (
            "runs:",
            "scores: {b: {task: bits-per-byte, file: f, figure: bits}}\nruns:",
            "scores.b.figure: bits; must be one of bits_per_byte, nats_per_token",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write_study(tmp_path, (old, new))
    with pytest.raises(ConfigError) as raised:
        read_study(path)
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mock-data", "mok-data", "run dense: --mok-data: no such flag; did you mean --mock-data?"),
        ("tokens: 640", "tokens: 641", "tokens: 641; must be a multiple of a step's 64"),
        ("step: 4", "step: 10", "run dense_bf16: fork.step: 10; the run has fewer steps"),
        ("lr: 1.0e-3", "train-iters: 10", "tokens: train-iters gives the length too"),
        ("global-batch-size: 4", "global-batch-size: 0", "run dense: --global-batch-size"),
        ("lr: 1.0e-3", "lr: 1.0e-3\n  skip-train: true", "skip_train: the run would not make all"),
        (
            "lr: 1.0e-3",
            "lr: 1.0e-3\n  keep-last: 2",
            "keep-last: would delete checkpoints that forks load; give none",
        ),
        (
            "lr: 1.0e-3",
            "lr: 1.0e-3\n  save-interval: 1\n  save-retain-interval: 5",
            "run dense: save-retain-interval: would delete",
        ),
        ("[bf16, int4]", "[bf16, int3]", "run dense_int3: --grad-wire"),
        ("title:", "entry: train.py\ntitle:", "entry: train.py; must be one of"),
    ],
)
def test_flags_are_checked_before_anything_starts(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = write_study(tmp_path, (old, new), ("pairs: [[dense_int4, dense_bf16]]\n", ""))
    with pytest.raises(ConfigError) as raised:
        commands_of(path)
    assert message in str(raised.value) and str(path) in str(raised.value)


FORKED = "    ranks: 2"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            FORK,
            "    fork: {run: dense, step: 11}\n    tokens: 1280\n",
            "run dense_bf16: fork.step: 11; dense has 10 steps",
        ),
        (
            FORKED,
            f"{FORKED}\n    flags: {{hidden-size: 32}}",
            "run dense_bf16: hidden-size: 32; dense, whose checkpoint it loads, has 16; give both",
        ),
        (
            FORKED,
            f"{FORKED}\n    flags: {{global-batch-size: 8}}",
            "run dense_bf16: global-batch-size: 8; dense, whose checkpoint it loads, has 4; give",
        ),
        (
            FORKED,
            f"{FORKED}\n    flags: {{finetune: true}}",
            "run dense_bf16: finetune: would count from step 0; a fork counts on; leave it out",
        ),
        (
            "  dense: {}",
            "  dense: {ranks: 2, flags: {grad-path: topk}}",
            "run dense_bf16: ",
        ),
    ],
)
def test_a_fork_that_could_not_load_its_base_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    """The base would have trained before the fork is refused."""
    path = write_study(tmp_path, (old, new))
    with pytest.raises(ConfigError) as raised:
        commands_of(path)
    assert str(raised.value).startswith(f"{path}: {message}") and "\n" not in str(raised.value)
    if "topk" in new:
        assert "was saved on another gradient path" in str(raised.value)
        assert "--reset-grad-state" in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (FORK, "    fork: {run: dense, step: 10}\n    tokens: 1280\n"),
        (FORKED, f"{FORKED}\n    flags: {{hidden-dropout: 0.5, lr: 2.0e-3}}"),
        (FORKED, f"{FORKED}\n    flags: {{micro-batch-size: 1, tokenizer-type: NullTokenizer}}"),
        ("eval-iters: 1", "eval-iters: 0\n  full-validation: true"),
    ],
)
def test_what_the_trainer_accepts_is_accepted(tmp_path: Path, old: str, new: str) -> None:
    path = write_study(tmp_path, (old, new))
    if "full-validation" in new:  # which mock data has none of
        path.write_text(path.read_text().replace("mock-data: true", "data-path: d"), "utf-8")
    commands_of(path).check_losses()


def test_a_run_without_a_loss_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write_study(tmp_path, ("eval-iters: 1", "eval-iters: 0"))
    with pytest.raises(ConfigError, match="run dense: eval-iters: 0; the run would have no loss"):
        Execution(
            read_study(path),
            tmp_path,
            data=tmp_path,
            jobs=1,
            launcher=Launcher(read_study(path), jobs=1),
            log=print,
        )


def test_a_fork_loads_its_base(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    study, commands = read_study(path), commands_of(path)
    base, fork = study.run("dense-seed1"), study.run("dense_int4-seed1")
    assert commands.fork_steps(base) == [4] and commands.fork_steps(fork) == []
    assert commands.flags(base, until=4)[-2:] == ["--exit-interval", "4"]
    assert "--exit-interval" not in commands.flags(base) and "--load" not in commands.flags(base)
    flags = commands.flags(fork)
    assert flags[flags.index("--load") + 1] == str(tmp_path / "runs" / "dense-seed1")
    assert flags[flags.index("--ckpt-step") + 1] == "4"
    assert flags[flags.index("--micro-batch-size") + 1] == "2", "a half of the batch on each rank"
    assert (commands.steps(fork), commands.data_parallel(fork)) == (10, 2)


def test_the_sizes_of_a_step_may_come_from_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text("training: {micro_batch_size: 2, global_batch_size: 4}\n", encoding="utf-8")
    path = write_study(tmp_path, ("global-batch-size: 4", f"config: {config}"))
    run = read_study(path).run("dense-seed1")
    commands = commands_of(path)
    digest = commands.digest(run)
    assert commands.steps(run) == 10 and "--micro-batch-size" not in commands.flags(run)
    config.write_text("training: {micro_batch_size: 1, global_batch_size: 4}\n", encoding="utf-8")
    assert commands_of(path).digest(run) != digest, "the content of the file counts"


def test_a_configuration_keeps_what_the_study_would_set(tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text("training: {micro_batch_size: 1}\nevaluation: {eval_interval: 5}\n", "utf-8")
    path = write_study(tmp_path, ("lr: 1.0e-3", f"lr: 1.0e-3\n  config: {config}"))
    found = commands_of(path).config(read_study(path).run("dense-seed1"))
    assert (found.training.micro_batch_size, found.evaluation.eval_interval) == (1, 5)
    missing = write_study(tmp_path, ("lr: 1.0e-3", "lr: 1.0e-3\n  config: absent.yaml"))
    with pytest.raises(ConfigError, match="run dense: absent.yaml: cannot read the configuration"):
        commands_of(missing)


def test_a_merge_of_a_merge_is_no_repeated_key(tmp_path: Path) -> None:
    added = [
        "x: {ranks: 2, flags: &bf16 {grad-wire: bf16, lr: 1.0e-3}}",
        '"x_{rate}": {ranks: 2, grid: {rate: {fast: &fast {<<: *bf16, lr: 2.0e-3}}}}',
        "y: {ranks: 2, flags: {<<: *fast}}",
    ]
    path = write_study(tmp_path, ("  dense: {}", "\n  ".join(["  dense: {}", *added])))
    assert read_study(path).run("y-seed1").flags["lr"] == 2.0e-3


def test_ranks_of_one_copy_share_its_batch(tmp_path: Path) -> None:
    change = ("ranks: 2", "ranks: 4\n    flags: {tensor-model-parallel-size: 2}")
    pairs = ("[[dense_int4, dense_bf16]]", "[]")
    path = write_study(tmp_path, change, ("[bf16, int4]", "[bf16]"), pairs)
    commands, run = commands_of(path), read_study(path).run("dense_bf16-seed1")
    flags = commands.flags(run)
    assert flags[flags.index("--micro-batch-size") + 1] == "2" and commands.data_parallel(run) == 2


def test_settings_are_told_apart_but_not_the_folders(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    run = read_study(path).run("dense_int4-seed1")
    digest = commands_of(path).digest(run)
    assert Commands(read_study(path), Path("other"), Path("elsewhere")).digest(run) == digest
    changed = write_study(tmp_path, ("lr: 1.0e-3", "lr: 2.0e-3"))
    study = read_study(changed)
    assert commands_of(changed).digest(study.run("dense_int4-seed1")) != digest


def test_the_data_folder_replaces_its_place(tmp_path: Path) -> None:
    path = write_study(tmp_path, ("mock-data: true", 'data-path: "{data}/text_document"'))
    flags = commands_of(path).flags(read_study(path).runs[0])
    assert str(tmp_path / "data" / "text_document") in flags
