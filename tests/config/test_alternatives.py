"""Alternative settings: a flag replaces the file's settings of the same group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.compatibility import identity
from megatron.config import parse, resolve, to_yaml
from megatron.config.gpt import GPTConfig
from megatron.config.validate import alternatives_of
from megatron.errors import ConfigError
from pretrain_gpt import GRADIENT_PATHS

MODEL = """\
num_layers: 2
hidden_size: 64
num_attention_heads: 4
seq_length: 32
micro_batch_size: 2
lr: 0.001
"""
STEPS = "train_iters: 10\n"


def read(tmp_path: Path, text: str, *flags: str):
    file = tmp_path / "small.yaml"
    file.write_text(MODEL + text)
    return parse(["--config", str(file), *flags], paths=GRADIENT_PATHS)


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (STEPS, "--train-samples 64", {"train_samples": 64, "train_iters": None}),
        (
            "train_samples: 64\n",
            "--train-iters 7",
            {"train_samples": None, "train_iters": 7},
        ),
        (
            f"{STEPS}lr_warmup_fraction: 0.2\n",
            "--lr-warmup-iters 3",
            {"lr_warmup_fraction": None, "lr_warmup_iters": 3},
        ),
        (
            f"{STEPS}lr_warmup_iters: 3\n",
            "--lr-warmup-fraction 0.2",
            {"lr_warmup_fraction": 0.2, "lr_warmup_iters": 0},
        ),
        (f"{STEPS}bf16: true\n", "--fp16", {"bf16": False, "fp16": True}),
        (
            f"{STEPS}mock_data: true\n",
            "--data-path some",
            {"mock_data": False, "data_path": ("some",)},
        ),
        (
            f"{STEPS}data_path: [some]\n",
            "--train-data-path a --valid-data-path b --test-data-path c",
            {"data_path": None, "train_data_path": ("a",), "valid_data_path": ("b",)},
        ),
        (
            f"{STEPS}grad_path: radius\nradius_interval: 2\nradius_start_fraction: 0.5\n",
            "--radius-start-iter 4",
            {"radius_start_fraction": None, "radius_start_iter": 4},
        ),
    ],
)
def test_a_flag_replaces_its_alternatives_in_the_file(
    tmp_path: Path, text: str, flags: str, expected: dict[str, object]
) -> None:
    config = read(tmp_path, text, *flags.split())
    values = config.values()
    assert {name: values[name] for name in expected} == expected
    flag = flags.split()[0]
    notices = [notice for notice in config.notices if notice.startswith(f"{flag} ")]
    assert len(notices) == 1 and " replaces " in notices[0], config.notices
    line = MODEL.count("\n") + text.count("\n")
    assert f"small.yaml:{line}" in notices[0]
    # The saved file has one of them, so that it reads back.
    saved = tmp_path / "saved.yaml"
    saved.write_text(to_yaml(resolve(config, world_size=1)))
    again = parse(["--config", str(saved)], paths=GRADIENT_PATHS).values()
    assert {name: again[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (f"{STEPS}train_samples: 64\n", "", "train_iters with train_samples"),
        ("", "--train-iters 7 --train-samples 64", "train_iters with train_samples"),
        (f"{STEPS}bf16: true\nfp16: true\n", "", "fp16 with bf16"),
        # A flag that unsets one setting says nothing of the others.
        (f"{STEPS}train_samples: 64\n", "--lr-warmup-fraction none", "train_iters with"),
        (
            f"{STEPS}lr_warmup_iters: 3\nlr_warmup_fraction: 0.2\n",
            "--lr-warmup-samples 0",
            "lr_warmup_fraction with lr_warmup_iters",
        ),
    ],
)
def test_two_in_one_place_stay_an_error(tmp_path: Path, text: str, flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text, *flags.split())


def test_a_value_that_cannot_be_read_is_still_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_iters: x is not an integer"):
        read(tmp_path, "train_iters: x\n", "--train-samples", "64")


def test_every_name_of_the_table_is_a_field() -> None:
    known = read_fields()
    groups = [
        *alternatives_of(GPTConfig),
        *(g for path in GRADIENT_PATHS.values() for g in path.alternatives),
    ]
    for group in groups:
        assert len(group) > 1
        assert {name for way in group for name in way} <= known


def read_fields() -> set[str]:
    """Return the names of all settings."""
    from megatron.config import fields_by_section

    return {spec.name for specs in fields_by_section(GRADIENT_PATHS).values() for spec in specs}


# ---- settings of older versions ------------------------------------------------------------------


def test_a_config_of_an_older_version_is_read(tmp_path: Path) -> None:
    text = f"{STEPS}grad_path: radius\nradius_interval: 2\nradius_residual: in-place\n"
    config = read(tmp_path, f"{text}logging:\n  log_progress: true\n")
    assert config.values()["radius_residual"] == "separate"
    told = "\n".join(config.notices)
    assert "radius_residual: in-place is read as separate" in told
    assert "log_progress is ignored: metrics.jsonl" in told
    quiet = read(tmp_path, f"{STEPS}logging:\n  log_progress: false\n")
    assert "log_progress" not in "\n".join(quiet.notices)


def test_flags_of_an_older_version_are_announced(tmp_path: Path) -> None:
    line = "--grad-path radius --radius-interval 2 --radius-residual in-place --log-progress"
    config = read(tmp_path, STEPS, *line.split())
    assert config.values()["radius_residual"] == "separate"
    told = "\n".join(config.notices)
    assert "--radius-residual: in-place is read as separate" in told
    assert "--log-progress" in told


PRESET = {
    "radius_schedule": "rolling",
    "radius_density": 0.35,
    "radius_interval": 20,
    "radius_clip": "per-step",
}


@pytest.mark.parametrize("path", ["radius", "samo+radius"])
@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("", "", PRESET),
        ("", "--radius-density 0.2", PRESET | {"radius_density": 0.2}),
        ("radius_interval: 200\n", "", PRESET | {"radius_interval": 200}),
    ],
)
def test_a_preset_sets_what_is_not_given(
    path: str, text: str, flags: str, expected: dict[str, object], tmp_path: Path
) -> None:
    text += "train_iters: 400\n" + ("samo_sparsity: 0.5\n" if path != "radius" else "")
    config = read(tmp_path, text, "--grad-path", path, "--radius-preset", "best", *flags.split())
    options = config.extensions["radius"]
    assert {name: getattr(options, name) for name in expected} == expected
    assert config.gradient.grad_wire == "bf16"
    implied = [name for name in PRESET if PRESET[name] == expected[name]]
    (line,) = [line for line in config.notices if line.startswith("radius_preset best: ")]
    assert [part.split()[0] for part in line.split(": ")[1].split(", ")] == [*implied, "grad_wire"]

    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    repeated = parse(["--config", str(again)], paths=GRADIENT_PATHS)
    assert to_yaml(repeated) == to_yaml(config) and "preset" not in again.read_text()
    assert not [line for line in repeated.notices if "preset" in line]
    # A checkpoint compares the values that the preset stands for.
    assert identity(config) == identity(repeated)


def test_without_a_preset_radius_is_as_the_paper_has_it(tmp_path: Path) -> None:
    config = read(tmp_path, "train_iters: 2000\n", "--grad-path", "radius")
    options: Any = config.extensions["radius"]
    found = (options.radius_schedule, options.radius_density, options.radius_interval)
    assert found == ("paper", 0.4, 200) and config.gradient.grad_wire is None
    assert not [line for line in config.notices if "preset" in line]
