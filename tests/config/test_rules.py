"""Ranges, refused pairs and rules: each message has the field, its value and the way out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.config import GPTConfig, ModelConfig, TrainingConfig, check, pairs_of, resolve
from megatron.config.gpt import SPECS, check_vocabulary
from megatron.errors import ConfigError
from tests.config.helpers import MODEL, PATHS, REQUIRED, SMALL, parse, read, refusal, refused

BOUNDED = [spec for spec in SPECS.values() if spec.within is not None and not spec.many]


@pytest.mark.parametrize("spec", BOUNDED, ids=lambda spec: spec.name)
def test_ranges(spec) -> None:
    low, high = spec.within.low, spec.within.high
    outside = [low if spec.within.low_open else low - 1]
    if high < 2**32:
        outside.append(high if spec.within.high_open else high + 1)
    for value in outside:
        typed = spec.kind(value)
        message = refused(f"{spec.flag}={value}")
        assert message == f"{spec.flag}: {typed} is out of range; must be {spec.within}"


def test_ranges_read_well() -> None:
    assert refused("--eval-interval", "0") == (
        "--eval-interval: 0 is out of range; must be at least 1"
    )
    assert refused("--micro-batch-size", "0") == (
        "--micro-batch-size: 0 is out of range; must be in [1, 1073741824]"
    )
    assert refused("--hidden-dropout", "1.0").endswith("1.0 is out of range; must be in [0, 1)")
    assert refused("--lr", "0").endswith("0.0 is out of range; must be more than 0")
    assert refused("--rotary-percent", "0").endswith("must be in (0, 1]")
    assert refused("--seed", str(2**32)).endswith("must be in [0, 4294967295]")
    assert refused("--distributed-timeout-minutes", "0").endswith("must be in [0.01, 10080]")
    assert refused("--distributed-timeout-minutes", "99999").endswith("must be in [0.01, 10080]")
    assert refused("--exit-duration-in-mins", "0").endswith("must be more than 0")
    assert refused("--rampup-batch-size", "1", "0", "5").startswith("--rampup-batch-size: 0 is out")


RAMP = ("--train-iters", "none", "--train-samples", "100", "--global-batch-size", "8")
STAGES = ("--num-layers", "5", "--pipeline-model-parallel-size", "2")

REFUSALS = {
    ("--split", "a,b,c"): "split 'a,b,c': not numbers; --split wants three numbers >= 0, not all "
    "0, for train, valid and test, as in 969,30,1",
    ("--hidden-size", "100", "--num-attention-heads", "12"): "hidden_size 100 is not a multiple of "
    "num_attention_heads 12; nearest hidden_size: 96, 108 (or give --kv-channels)",
    (
        "--group-query-attention",
        "--num-query-groups",
        "3",
    ): "num_attention_heads 4 is not a multiple of num_query_groups 3; allowed: 1, 2, 4",
    ("--max-position-embeddings", "16"): "seq_length 32 is more than max_position_embeddings 16; "
    "raise the latter or leave it out",
    ("--position-embedding-type", "rope", "--kv-channels", "15"): "rotary_percent 1.0 of 15 "
    "channels a head is 15; rotary positions need an even number of at least 2; change kv_channels "
    "or rotary_percent",
    ("--min-lr", "0.5"): "min_lr 0.5 is more than lr 0.001; lower min_lr",
    ("--lr-warmup-init", "0.5"): "lr_warmup_init 0.5 is more than lr 0.001; lower lr_warmup_init",
    ("--lr-warmup-iters", "10"): "lr_warmup_iters 10 must be less than train_iters 10; lower the "
    "warm-up",
    ("--lr-warmup-iters", "7", "--lr-decay-iters", "5"): "lr_warmup_iters 7 must be less than "
    "lr_decay_iters 5; lower the warm-up",
    (*RAMP, "--lr-warmup-samples", "100"): "lr_warmup_samples 100 must be less than train_samples "
    "100; lower the warm-up",
    ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "9", "--lr-warmup-iters", "2"): (
        "lr_wsd_decay_iters 9 with lr_warmup_iters 2 is more than train_iters 10; lower one of them"
    ),
    ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "9", "--lr-warmup-fraction", "0.2"): (
        "lr_wsd_decay_iters 9 with lr_warmup_fraction 0.2 is more than train_iters 10; lower one "
        "of them"
    ),
    (
        *("--lr-decay-style", "multi-step", "--lr-multi-step-iters", "3", "5"),
        *("--lr-multi-step-factors", "0.1"),
    ): "lr_multi_step_iters has 2 values and lr_multi_step_factors 1; give one factor for each "
    "step",
    (
        *("--lr-decay-style", "multi-step", "--lr-multi-step-iters", "5", "3"),
        *("--lr-multi-step-factors", "0.1", "0.2"),
    ): "lr_multi_step_iters 5 3 must ascend; sort them",
    ("--min-loss-scale", "8", "--initial-loss-scale", "4"): "min_loss_scale 8.0 is more than "
    "initial_loss_scale 4.0; lower the former",
    ("--recompute-granularity", "full", "--recompute-num-layers", "3"): "recompute_num_layers 3 is "
    "more than num_layers 2; lower the former",
    ("--profile", "--profile-step-end", "5"): "profile_step_end 5 must be more than "
    "profile_step_start 10; raise the end",
    ("--save-retain-interval", "8"): "save_retain_interval 8 needs save_interval; give "
    "--save-interval",
    ("--save-retain-interval", "8", "--save-interval", "3"): "save_retain_interval 8 is not a "
    "multiple of save_interval 3; nearest: 6, 9",
    ("--tensor-model-parallel-size", "3"): "num_attention_heads 4 is not a multiple of "
    "tensor_model_parallel_size 3; sizes below that would do: 1, 2",
    ("--pipeline-model-parallel-size", "3"): "pipeline_model_parallel_size 3 leaves a stage "
    "without layers: num_layers 2; lower it",
    (*STAGES, "--decoder-first-pipeline-num-layers", "5"): "pipeline_model_parallel_size 2 leaves "
    "a stage without layers: num_layers 5, of which 5 are given to the ends; lower that or what "
    "the ends hold",
    (
        *(*STAGES, "--decoder-first-pipeline-num-layers", "3"),
        *("--decoder-last-pipeline-num-layers", "1"),
    ): "decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers make 4 layers, "
    "num_layers is 5; they must agree",
    (*STAGES, "--num-layers-per-virtual-pipeline-stage", "2"): (
        "num_layers_per_virtual_pipeline_stage 2: num_layers 5 is not a multiple of 2 x "
        "pipeline_model_parallel_size 2; leave it out"
    ),
    (*RAMP, "--rampup-batch-size", "2", "4", "9"): "rampup_batch_size: from 2 by 4 never meets "
    "global_batch_size 8; nearest global_batch_size: 6, 10",
    (*RAMP, "--rampup-batch-size", "10", "4", "9"): "rampup_batch_size starts at 10, above "
    "global_batch_size 8; lower the start",
    (
        "--weight-decay-incr-style",
        "linear",
        "--start-weight-decay",
        "0.2",
        "--end-weight-decay",
        "0.1",
    ): "start_weight_decay 0.2 is more than end_weight_decay 0.1; weight decay may only grow: "
    "exchange them",
}


def test_a_vocabulary_has_a_token_for_each_tensor_parallel_rank() -> None:
    ranks = ("--tensor-model-parallel-size", "4")
    assert refused(*ranks, "--vocab-size", "3") == (
        "vocab_size 3 is less than tensor_model_parallel_size 4: every tensor-parallel rank must "
        "hold a token; give --tensor-model-parallel-size 3 or less"
    )
    read(*ranks, "--vocab-size", "4")
    # This tokenizer adds a token of its own; how many it has is asked when the data is read.
    config = read(*ranks, "--vocab-size", "3", "--tokenizer-type", "NullTokenizer")
    check_vocabulary(config, 4)
    with pytest.raises(ConfigError, match="vocab_size 3 is less than"):
        check_vocabulary(config, 3)


@pytest.mark.parametrize("line", REFUSALS, ids=lambda line: " ".join(line[-4:]))
def test_rules(line: tuple[str, ...]) -> None:
    assert refused(*line) == REFUSALS[line]


def test_legal_neighbours_of_the_rules() -> None:
    read("--hidden-size", "100", "--num-attention-heads", "12", "--kv-channels", "8")
    read("--group-query-attention", "--num-query-groups", "2")
    read("--num-query-groups", "3")
    read("--position-embedding-type", "rope", "--rotary-percent", "0.25", "--reset-position-ids")
    assert read("--lr-warmup-iters", "9").optimizer.lr_warmup_iters == 9
    assert read("--min-lr", "0.001").optimizer.min_lr == 0.001
    read(*RAMP, "--rampup-batch-size", "8", "3", "50")


PAIRS = {
    "use_rope_scaling without position_embedding_type rope": ("--use-rope-scaling",),
    "fp16 with bf16": ("--fp16", "--bf16"),
    "grad_reduce_in_bf16 without bf16": ("--grad-reduce-in-bf16",),
    "grad_reduce_in_bf16 with accumulate_allreduce_grads_in_fp32": (
        "--bf16",
        "--grad-reduce-in-bf16",
        "--accumulate-allreduce-grads-in-fp32",
    ),
    "loss_scale without fp16": ("--loss-scale", "8"),
    "train_iters with train_samples": ("--train-samples", "10"),
    "rampup_batch_size with train_iters": ("--rampup-batch-size", "1", "1", "1"),
    "rampup_batch_size without global_batch_size": (
        *("--train-iters", "none", "--train-samples", "9", "--rampup-batch-size", "1", "1", "1"),
    ),
    "train_iters with lengths in samples": ("--lr-warmup-samples", "1"),
    "train_samples with lengths in iters": (
        *("--train-iters", "none", "--train-samples", "9", "--lr-decay-iters", "1"),
    ),
    "lr_warmup_fraction with lr_warmup_iters or lr_warmup_samples": (
        *("--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "1"),
    ),
    "lr_decay_style WSD without its decay's length": ("--lr-decay-style", "WSD"),
    "lr_decay_style multi-step without its steps and their factors": (
        *("--lr-decay-style", "multi-step", "--lr-multi-step-iters", "3"),
    ),
    "lr_multi_step_iters, _samples or _factors without lr_decay_style multi-step": (
        *("--lr-multi-step-factors", "0.1"),
    ),
    "sgd_nesterov or sgd_weight_decay coupled without optimizer sgd": (
        *("--sgd-weight-decay", "coupled"),
    ),
    "main_params_dtype bf16 without bf16": (*("--main-params-dtype", "bf16"),),
    "main_params_dtype fp16 without fp16": (*("--main-params-dtype", "fp16", "--bf16"),),
    "exp_avg_dtype or exp_avg_sq_dtype fp16 with bf16": (
        *("--exp-avg-sq-dtype", "fp16", "--bf16"),
    ),
    "main_params_rounding with main_params_dtype fp32": (
        *("--main-params-rounding", "stochastic", "--bf16"),
    ),
    "exp_avg_sq_dtype with optimizer sgd": (*("--exp-avg-sq-dtype", "int8", "--optimizer", "sgd"),),
    "sgd_nesterov with sgd_momentum 0": (
        *("--optimizer", "sgd", "--sgd-nesterov", "--sgd-momentum", "0"),
    ),
    "constant weight decay with start_weight_decay or end_weight_decay": (
        *("--start-weight-decay", "0.1"),
    ),
    "changing weight decay without start_weight_decay and end_weight_decay": (
        *("--weight-decay-incr-style", "cosine", "--start-weight-decay", "0.1"),
    ),
    "recompute_method or recompute_num_layers without recompute_granularity": (
        *("--recompute-method", "block"),
    ),
    "dataloader_type cyclic": ("--dataloader-type", "cyclic"),
    "dataloader_type external": ("--dataloader-type", "external"),
    "optimizer_impl apex with device cpu": ("--optimizer-impl", "apex", "--device", "cpu"),
    "distributed_backend nccl with device cpu": (
        *("--distributed-backend", "nccl", "--device", "cpu"),
    ),
    "distributed_backend gloo with device cuda": (
        *("--distributed-backend", "gloo", "--device", "cuda"),
    ),
    "use_distributed_optimizer with a grad_path other than dense, samo and radius": (
        *("--use-distributed-optimizer", "--grad-path", "sparse"),
    ),
    "dp_inner_size above 1 with a grad_path other than dense, samo and radius": (
        *("--dp-inner-size", "2", "--grad-path", "sparse"),
    ),
    "dp_inner_size above 1 with grad_wire": ("--dp-inner-size", "2", "--grad-wire", "bf16"),
    "dp_inner_size above 1 with optimizer_cpu_offload": (
        *("--bf16", "--optimizer-cpu-offload", "--dp-inner-size", "2"),
    ),
    "overlap_param_gather without use_distributed_optimizer and dp_inner_size": (
        "--overlap-param-gather",
    ),
    "data_path with train_, valid_ or test_data_path": (
        *("--data-path", "a", "--valid-data-path", "b"),
    ),
    "full_validation with mock_data": ("--full-validation", "--mock-data"),
    "num_layers_per_virtual_pipeline_stage without pipeline_model_parallel_size above 1": (
        *("--num-layers-per-virtual-pipeline-stage", "1"),
    ),
    "num_layers_per_virtual_pipeline_stage with decoder_first_ or _last_pipeline_num_layers": (
        *("--num-layers", "4", "--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "1"),
        *("--decoder-last-pipeline-num-layers", "2"),
    ),
    "decoder_first_ or decoder_last_pipeline_num_layers without a pipeline": (
        *("--decoder-first-pipeline-num-layers", "2"),
    ),
    "recompute_granularity selective with recompute_method or recompute_num_layers": (
        *("--recompute-granularity", "selective", "--recompute-num-layers", "1"),
    ),
    "recompute_method with recompute_granularity other than full and selective": (
        *("--recompute-granularity", "residual", "--recompute-method", "uniform"),
    ),
    "recompute_num_layers with recompute_granularity ops or no-norm": (
        *("--recompute-granularity", "ops", "--recompute-num-layers", "1"),
    ),
    "compile with recompute_granularity other than full and selective": (
        *("--recompute-granularity", "every", "--compile"),
    ),
    "pipeline_schedule message-driven without pipeline_model_parallel_size above 1": (
        *("--pipeline-schedule", "message-driven"),
    ),
    "pipeline_schedule message-driven with num_layers_per_virtual_pipeline_stage": (
        *("--num-layers", "4", "--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "1"),
        *("--pipeline-schedule", "message-driven"),
    ),
    "pipeline_limit without pipeline_schedule message-driven": (
        *("--pipeline-model-parallel-size", "2", "--pipeline-limit", "3"),
    ),
    "multiple_validation_sets with weights of valid_data_path": (
        *("--train-data-path", "a", "--valid-data-path", "0.5", "b", "0.5", "c"),
        "--multiple-validation-sets",
    ),
    "optimizer_cpu_offload without fp16 or bf16": ("--optimizer-cpu-offload",),
    "optimizer_cpu_offload with a grad_path other than dense and samo": (
        *("--bf16", "--optimizer-cpu-offload", "--grad-path", "sparse"),
    ),
    "optimizer_cpu_offload with use_distributed_optimizer": (
        *("--bf16", "--optimizer-cpu-offload", "--use-distributed-optimizer"),
    ),
    "optimizer_cpu_offload with ddp_bucket_size": (
        *("--bf16", "--optimizer-cpu-offload", "--ddp-bucket-size", "4096"),
    ),
    "grad_wire with gradients accumulated in 16 bits": ("--grad-wire", "bf16", "--fp16"),
    "grad_wire with predivide_loss": ("--grad-wire", "bf16", "--predivide-loss"),
    "predivide_loss with a grad_path other than dense and samo": (
        *("--predivide-loss", "--grad-path", "sparse"),
    ),
    "recompute_method sqrt with recompute_num_layers": (
        *("--recompute-granularity", "full", "--recompute-method", "sqrt"),
        *("--recompute-num-layers", "2"),
    ),
}


@pytest.mark.parametrize("pair", pairs_of(GPTConfig), ids=lambda pair: pair.name)
def test_refused_pairs(pair) -> None:
    line = PAIRS[pair.name]
    message = refused(*line)
    assert message.startswith(f"{pair.name}: {pair.reason} (") and message.endswith(pair.instead)
    values = read().values()
    mentioned = [word for word in pair.name.replace(",", "").split() if word in values]
    assert mentioned and all(f"{name} is " in message for name in mentioned)


@pytest.mark.parametrize("granularity", [(), ("--recompute-granularity", "selective")])
def test_the_sqrt_rule_is_of_full_recomputation(granularity: tuple[str, ...]) -> None:
    message = refused(*granularity, "--recompute-method", "sqrt")
    assert "recompute_method is 'sqrt'" in message and "--recompute-granularity full" in message


def test_values_of_pairs_are_shown() -> None:
    assert refused("--fp16", "--bf16") == (
        "fp16 with bf16: parameters have one format (fp16 is true, bf16 is true); turn one of them "
        "off"
    )
    in_turns = refused("--num-layers-per-virtual-pipeline-stage", "1")
    assert "(num_layers_per_virtual_pipeline_stage is 1, " in in_turns


# ---------------------------------------------------------------------------------- folders


@pytest.mark.parametrize(
    "name", ["-rf", "a b; rm", "$(id)", "x" * 300, "a\nb", "..", ".", "r/..", "é", "", "a/ "]
)
def test_names_of_runs(name: str) -> None:
    message = refused(f"--run-dir={name}")
    assert message.startswith(("run_dir: ", "--run-dir: "))
    last = name.rpartition("/")[2]
    assert last[:20] in message or ascii(last).strip("'") in message


def test_good_names_of_runs() -> None:
    for name in ("run-1", "../x", "/scratch/me/gpt_124m.v2", "a b/c", "x/"):
        assert read("--run-dir", name).run.run_dir == name


def test_the_name_of_the_file_names_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a b.yaml"
    path.write_text("\n".join(f"{name}: {value}" for name, value in SMALL.items()))
    message = refusal(["--config", str(path)])
    assert message.startswith("configuration's name: 'a b' is no name for a run")
    named = parse(["--config", str(path), "--run-dir", str(tmp_path / "ab")], paths=PATHS)
    assert named.name == "a b"


def test_output_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    prefix = str(tmp_path / "data" / "text_document")
    assert refused("--run-dir", "/").startswith("run_dir: '/' is the root folder (/); must be a")
    assert refused("--save", "/./").startswith("save: '/./' is the root folder (/)")
    assert refused("--run-dir", f"{tmp_path}/home").startswith("run_dir: ")
    assert f"is the home folder ({tmp_path}/home)" in refused("--save", f"{tmp_path}/home/")
    for flag, more in (("--run-dir", ("--data-path", prefix)), ("--save", ("--data-path", prefix))):
        message = refused(flag, f"{tmp_path}/link", *more)
        assert f"is a data folder ({tmp_path}/data); must be a folder of its own" in message
    message = refused("--save", f"{tmp_path}/data", "--valid-data-path", "1", prefix)
    assert message.startswith("save: ") and "is a data folder" in message
    config = read("--save", f"{tmp_path}/data/run", "--data-path", prefix)
    assert config.checkpoint.save == f"{tmp_path}/data/run"
    config = read("--run-dir", f"{tmp_path}/link")
    assert f"run_dir {tmp_path}/link is really {tmp_path}/data" in config.notices


# ------------------------------------------------------------------------- the number of ranks


def test_worlds_that_do_not_fit() -> None:
    parallel = dataclasses.replace(
        read().parallel, tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    )
    config = dataclasses.replace(read(), parallel=parallel)
    with pytest.raises(ConfigError, match="world size 6 is not a multiple of 4, .*nearest: 4, 8"):
        resolve(config, 6)
    with pytest.raises(ConfigError, match="world size 0 is out of range; must be at least 1"):
        resolve(config, 0)
    inner = dataclasses.replace(parallel, dp_inner_size=2)
    in_nodes = dataclasses.replace(config, parallel=inner)
    with pytest.raises(ConfigError, match="dp_inner_size 2 does not divide 3 data-parallel ranks"):
        resolve(in_nodes, 12)
    with pytest.raises(ConfigError, match="into several groups; give --use-distributed-optimizer"):
        resolve(in_nodes, 8)
    larger = dataclasses.replace(config, parallel=dataclasses.replace(inner, dp_inner_size=5))
    with pytest.raises(ConfigError, match="give --dp-inner-size 2 or 4, or --use-distributed"):
        resolve(larger, 32)
    assert resolve(in_nodes, 16).parallel.num_shards(4) == 2
    assert resolve(config, 8).data_parallel_size(8) == 2


def test_batches_that_do_not_fit() -> None:
    def error(dp: int, *more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            resolve(read("--micro-batch-size", "4", *more), dp)
        return str(caught.value)

    assert error(1, "--global-batch-size", "10") == (
        "global_batch_size 10 is not a multiple of 4, micro_batch_size 4 x data-parallel size 1; "
        "nearest: 8, 12"
    )
    assert error(2, "--global-batch-size", "4").endswith("nearest: 8")
    ramp = ("--train-iters=none", "--train-samples=100", "--global-batch-size=16")
    assert error(1, *ramp, "--rampup-batch-size", "4", "2", "20").startswith(
        "rampup_batch_size increment 2 is not a multiple of 4"
    )
    assert error(2, *ramp, "--rampup-batch-size", "4", "4", "20").startswith(
        "rampup_batch_size start 4 is not a multiple of 8"
    )
    assert error(1, "--train-iters=none", "--train-samples=3") == (
        "train_samples 3 is less than the first global batch of 4; raise it to at least that"
    )


def test_configurations_made_in_code_are_checked_alike() -> None:
    model = dataclasses.replace(ModelConfig(**MODEL), hidden_size=65)
    config = GPTConfig(model=model, training=TrainingConfig(micro_batch_size=1, skip_train=True))
    with pytest.raises(ConfigError, match="hidden_size 65 is not a multiple"):
        check(config)
    bad = dataclasses.replace(model, hidden_dropout=1.0)
    with pytest.raises(ConfigError, match="^hidden_dropout: 1.0 is out of range"):
        check(dataclasses.replace(config, model=bad))


# ---------------------------------------------------------------------------------- notices


def test_notices() -> None:
    def said(*line: str) -> tuple[str, ...]:
        return read("--log-interval", "1", "--overlap-grad-reduce", "true", *line).notices

    assert said() == ()
    assert said("--save-interval", "20") == (
        "save_interval 20 is more than train_iters 10: only the end is saved",
    )
    assert said("--log-interval", "11") == (
        "log_interval 11 is more than train_iters 10: no step is printed",
    )
    assert said("--mock-data", "--data-path", "a") == (
        "mock_data is on: the data paths are not read",
    )
    assert said("--num-query-groups", "2") == (
        "num_query_groups 2 is not read without --group-query-attention",
    )
    assert said("--offload-coarsening", "2") == (
        "the offload_ settings are not read without --optimizer-cpu-offload",
    )
    assert said("--wandb-exp-name", "x") == (
        "wandb_exp_name x is not read without --wandb-project",
    )
    assert said("--lr-wsd-decay-iters", "5", "--hysteresis", "3") == (
        "lr_wsd_decay_iters 5 is not read without --lr-decay-style WSD; hysteresis 3 is not read "
        "without --fp16",
    )
    assert said("--optimizer", "sgd", "--sgd-momentum", "0.5") == ()
    assert said("--no-save-optim")[0].startswith("no_save_optim: this run cannot resume")
    assert "about 17 steps are skipped" in said("--fp16")[0]
    assert said("--fp16", "--initial-loss-scale", "65536") == ()
    assert said("--fp16", "--loss-scale", "65536", "--device", "cpu")[0].startswith(
        "fp16 on the CPU"
    )
    assert read().notices[-1].startswith("overlap_grad_reduce is on by default (Megatron-LM: off)")


def test_required_fields_alone_are_enough() -> None:
    assert read("--skip-train", base=REQUIRED).optimizer.lr is None
