"""Derived values, the batch ramp-up, and files that read back equal."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import GPTConfig, TrainingConfig, parse, resolve, to_yaml
from megatron.config.fields import FieldSpec
from megatron.config.gpt import SECTIONS, SPECS
from megatron.config.sections import describe_split, split_layers
from megatron.errors import ConfigError
from tests.config.helpers import PATHS, SMALL, read, read_yaml


def test_derived_values() -> None:
    config = read()
    model = config.model
    assert (model.ffn_size, model.head_dim, model.query_groups, model.positions) == (256, 16, 4, 32)
    assert model.tied and model.bias
    assert [model.padded_vocab_size(n) for n in (1, 128, 129, 50257)] == [128, 128, 256, 50304]
    resolved = resolve(config, 3)
    assert resolved.training.global_batch_size == 6
    assert resolved.model.max_position_embeddings == 32
    assert resolved.model.ffn_hidden_size == 256
    assert resolved.model.kv_channels == 16
    assert resolved.total_samples() == 60
    assert resolved.total_iterations() == 10
    assert resolved.num_microbatches(12, 3) == 2
    grouped = read("--group-query-attention", "--num-query-groups", "2").model
    assert grouped.query_groups == 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_resolving_twice_changes_nothing(world: int) -> None:
    resolved = resolve(read("--recompute-granularity", "full"), world)
    assert resolve(resolved, world) == resolved
    assert (resolved.name, resolved.notices) == (resolve(resolved, world).name, resolved.notices)
    assert resolved.recompute.recompute_method == "uniform"


def test_formats() -> None:
    def formats(*line: str) -> tuple[str, str]:
        precision = read(*line).precision
        return precision.param_dtype, precision.grad_dtype

    assert formats() == ("float32", "float32")
    assert formats("--bf16") == ("bfloat16", "float32")
    assert formats("--bf16", "--grad-reduce-in-bf16") == ("bfloat16", "bfloat16")
    assert formats("--fp16") == ("float16", "float16")
    assert formats("--fp16", "--accumulate-allreduce-grads-in-fp32") == ("float16", "float32")


# ------------------------------------------------------------------------------- the ramp-up


def _ramp(start: int, increment: int, samples: int, batch: int, total: int) -> TrainingConfig:
    return TrainingConfig(
        micro_batch_size=1,
        rampup_batch_size=(start, increment, samples),
        global_batch_size=batch,
        train_samples=total,
    )


def test_ramp_up_by_hand() -> None:
    # From 2 by 2 to 8 within 12 samples: three increments, one every 4 samples.
    training = _ramp(2, 2, 12, 8, 40)
    table = {0: 2, 3: 2, 4: 4, 7: 4, 8: 6, 11: 6, 12: 8, 13: 8, 39: 8}
    assert {consumed: training.batch_size_at(consumed) for consumed in table} == table
    # Batches: 2 2 4 6 (14 samples), then 3 whole batches of 8 and 2 samples left over.
    assert training.total_iterations() == 4 + 3


def test_no_ramp_where_start_is_the_batch() -> None:
    training = _ramp(8, 3, 12, 8, 40)
    assert [training.batch_size_at(n) for n in (0, 5, 12, 30)] == [8] * 4
    assert training.total_iterations() == 5


def _walk(training: TrainingConfig) -> int:
    """Iterations, counted one by one, leaving out a last partial batch."""
    consumed = iterations = 0
    while consumed + training.batch_size_at(consumed) <= training.total_samples():
        consumed += training.batch_size_at(consumed)
        iterations += 1
    return iterations


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(0, 6), st.integers(1, 90), st.integers(1, 400)
)
def test_iterations_of_a_ramp_are_those_of_the_walk(
    start: int, increment: int, stages: int, samples: int, total: int
) -> None:
    training = _ramp(start, increment, samples, start + stages * increment, total)
    assert training.total_iterations() == _walk(training)
    sizes = [training.batch_size_at(n) for n in range(samples + 3)]
    assert sizes == sorted(sizes) and sizes[0] == start
    assert sizes[samples:] == [start + stages * increment] * 3


def test_long_ramps_are_counted_quickly() -> None:
    assert _ramp(32, 32, 10**9, 4096, 3 * 10**11).total_iterations() > 7 * 10**7


def test_samples_without_a_ramp() -> None:
    config = resolve(read("--train-iters=none", "--train-samples=25"), 2)
    assert (config.total_iterations(), config.total_samples()) == (6, 25)
    assert config.batch_size_at(0) == config.batch_size_at(10**9) == 4


# ------------------------------------------------------------------------------------- YAML


def _other_value(spec: FieldSpec, rng: random.Random) -> object:
    """A legal value that is likely not the default."""
    if spec.optional and rng.random() < 0.3:
        return None
    if spec.choices:
        return rng.choice(spec.choices)
    if spec.kind is bool:
        return rng.random() < 0.5
    if spec.kind is str:
        text = rng.choice(TEXTS)
        return (text, "0.5", "no") if spec.many else text
    low = spec.within.low if spec.within else 0
    high = min(spec.within.high if spec.within else 9, low + 9)
    number = rng.randint(int(low) + 1, max(int(high), int(low) + 1))
    if spec.kind is float:
        number = rng.choice([low + 0.3, low + 1e-5, low + 1 / 3]) + (0 if high < 2 else number)
    return (number,) * (spec.count or 2) if spec.many else number


TEXTS = [
    "a", "no", "null", "true", "1e-4", "012", "1_000", "~", "a: b", "a #b", " x ", "é", "😀", "-",
    "- a", "'", '"', "\\n", "[a]", "{a}", "&a", "*a", "!a", "%a", "@a", "x" * 300, "a b " * 60,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_every_configuration_reads_back_equal(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    config = read()
    sections = {
        name: dataclasses.replace(
            getattr(config, name),
            **{
                spec.name: _other_value(spec, rng) or spec.default
                for spec in SPECS.values()
                if spec.section == name and spec.name not in KEPT and spec.saved
            },
        )
        for name in SECTIONS
    }
    config = dataclasses.replace(config, **sections)
    assert _reads_back(config, tmp_path / "a.yaml") == config


KEPT = set(SMALL) | {
    *("global_batch_size", "rampup_batch_size", "train_samples", "skip_train", "grad_path"),
    *("kv_channels", "max_position_embeddings", "group_query_attention", "rotary_percent"),
    *("use_rope_scaling", "dataloader_type", "memory_budget"),
    *("fp16", "bf16", "loss_scale", "grad_reduce_in_bf16", "min_loss_scale", "initial_loss_scale"),
    *("min_lr", "lr_warmup_init", "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    *("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    *("lr_multi_step_iters", "lr_multi_step_samples", "lr_multi_step_factors"),
    *("main_params_dtype", "main_params_rounding", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("optimizer", "sgd_momentum", "sgd_nesterov", "sgd_weight_decay"),
    *("lr_decay_style", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "profile"),
    "split",
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"),
    *("num_layers_per_virtual_pipeline_stage", "dp_inner_size", "overlap_param_gather"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("pipeline_schedule", "pipeline_limit", "optimizer_cpu_offload", "predivide_loss"),
    *("train_data_path", "valid_data_path", "test_data_path"),
    *("save_interval", "save_retain_interval", "full_validation"),
}
"""Fields that rules tie together; `ROUND_TRIPS` covers them."""

ROUND_TRIPS = (
    "",
    "--bf16 --grad-reduce-in-bf16 --clip-grad 0",
    "--save-interval 4 --save-retain-interval 8",
    "--fp16 --loss-scale 128 --min-loss-scale 0.5 --initial-loss-scale 1e10",
    "--train-iters none --train-samples 400 --global-batch-size 16 --rampup-batch-size 4 4 50 "
    "--lr-warmup-samples 9 --lr-decay-samples 300",
    "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2 --lr-decay-iters 9 --lr 1e-30",
    "--lr-decay-style multi-step --lr-multi-step-iters 3 6 --lr-multi-step-factors 0.2 0.4",
    "--optimizer sgd --sgd-nesterov --sgd-weight-decay coupled --sgd-momentum 0.5",
    "--lr-warmup-fraction 0.01 --min-lr 1e-5 --lr-warmup-init 1e-7 --lr-wsd-decay-iters 2",
    "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 1e22",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --profile",
    "--group-query-attention --num-query-groups 2 --kv-channels 8 --max-position-embeddings 64 "
    "--position-embedding-type rope --rotary-percent 0.5",
    "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32",
    "--train-data-path 1 a 2 b --valid-data-path none --test-data-path c",
    "--train-iters none --lr none --skip-train",
    "--grad-path sparse --sparse-density 1e-3 --sparse-layers 0 1",
    "--grad-path prune+sparse --prune-share 0.25",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--num-layers 5 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2",
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--global-batch-size 8",
    "--pipeline-model-parallel-size 2 --pipeline-schedule message-driven --pipeline-limit 3",
    "--fp16 --predivide-loss --optimizer-cpu-offload --offload-bucket-size 4096 "
    "--offload-coarsening 2",
    "--recompute-granularity full --recompute-method sqrt",
    "--full-validation",
    "--use-distributed-optimizer --overlap-param-gather",
)


@pytest.mark.parametrize("line", ROUND_TRIPS)
def test_resolved_files_read_back_equal(line: str, tmp_path: Path) -> None:
    for config in (read(*line.split()), resolve(read(*line.split()), 2)):
        again = _reads_back(config, tmp_path / "a.yaml")
        assert again == config
        assert to_yaml(again) == to_yaml(config)


def test_nodes_read_back_equal(tmp_path: Path) -> None:
    config = resolve(read("--dp-inner-size", "2", "--global-batch-size", "32"), 4)
    assert _reads_back(config, tmp_path / "a.yaml") == config
    assert (config.parallel.dp_inner_size, config.parallel.num_shards(4)) == (2, 2)


def test_microbatches_of_interleaved_stages_come_out_even() -> None:
    flags = "--num-layers 4 --pipeline-model-parallel-size 2"
    flags = [*flags.split(), "--num-layers-per-virtual-pipeline-stage", "1"]
    resolve(read(*flags, "--global-batch-size", "8"), 4)
    with pytest.raises(ConfigError) as caught:
        resolve(read(*flags, "--global-batch-size", "12"), 4)
    assert str(caught.value) == (
        "num_layers_per_virtual_pipeline_stage: global_batch_size 12 is no multiple of 8, "
        "micro_batch_size 2 x data-parallel size 2 x pipeline_model_parallel_size 2; change one "
        "of them"
    )


@pytest.mark.parametrize(
    ("layers", "stages", "asked", "split"),
    [
        (30, 4, {}, "0-7, 8-15, 16-22, 23-29"),
        (8, 3, {"first": 2, "last": 1}, "0-1, 2-6, 7"),
        (8, 2, {"per_virtual_stage": 2}, "0-1+4-5, 2-3+6-7"),
        (3, 1, {}, "0-2"),
    ],
)
def test_layers_are_shared_out_and_none_is_dropped(
    layers: int, stages: int, asked: dict[str, int], split: str
) -> None:
    found = split_layers(layers, stages, **asked)
    assert describe_split(found) == split
    held = sorted(layer for runs in found for run in runs for layer in run)
    assert held == list(range(layers)) and len(found) == stages


def _reads_back(config: GPTConfig, path: Path) -> GPTConfig:
    return read_yaml(path, to_yaml(config))


def test_other_readers_see_the_same_values() -> None:
    config = resolve(read("--lr", "1e-16", "--wandb-project", "no", "--data-path", "012", "x"), 1)
    seen = yaml.safe_load(to_yaml(config))
    flat = {name: value for section in seen.values() for name, value in section.items()}
    for name, value in config.values().items():
        if SPECS[name].saved:
            assert flat[name] == (list(value) if isinstance(value, tuple) else value), name


def test_the_file_does_not_hold_where_it_ran(tmp_path: Path) -> None:
    line = ["--run-dir", str(tmp_path / "r"), "--save", str(tmp_path / "s")]
    config = resolve(read(*line, "--device", "cpu", "--debug"), 1)
    text = to_yaml(config)
    assert str(tmp_path) not in text
    for word in ("run_dir", "save:", "device", "debug", "name:"):
        assert f"  {word}" not in text
    assert to_yaml(resolve(read(), 1)) == text


def test_no_variable_of_the_environment_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-value")
    assert "canary" not in to_yaml(resolve(read("--wandb-project", "p"), 1))
    assert os.environ["WANDB_API_KEY"] == "canary-value"


def test_shipped_files_are_read() -> None:
    folder = Path(__file__).resolve().parents[2] / "configs"
    for path in sorted(folder.glob("gpt_*.yaml")):
        config = parse(["--config", str(path)], paths=PATHS)
        assert config.name == path.stem
        assert not [notice for notice in config.notices if "overrides" in notice]
