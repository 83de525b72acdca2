"""The configurations of the AxoNN paper: tables I and II, parameters, what follows for a grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import GPTConfig, parse, resolve
from megatron.model.flops import parameter_count
from tests.config.helpers import PATHS

FOLDER = Path(__file__).resolve().parents[2] / "configs"
VOCABULARY = 51200
TABLES = {  # billions: layers, width, heads, GPUs (table I); micro-batch, stages (table II); V-A
    12: (48, 4512, 24, 48, 8, 6, 8),
    24: (48, 6336, 36, 96, 4, 12, 4),
    50: (96, 6528, 48, 192, 4, 24, 4),
    100: (96, 9360, 60, 384, 2, 48, 2),
}


def shipped(name: str, world: int) -> GPTConfig:
    return resolve(parse(["--config", str(FOLDER / f"{name}.yaml")], paths=PATHS), world)


@pytest.mark.parametrize("billions", TABLES)
def test_weak_scaling(billions: int) -> None:
    layers, width, heads, gpus, micro, stages, interval = TABLES[billions]
    config = shipped(f"gpt_{billions}b", gpus)
    model, training, parallel = config.model, config.training, config.parallel
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (
        *(layers, width, heads),
    )
    assert parallel.pipeline_model_parallel_size == stages
    assert config.data_parallel_size(gpus) == 8
    assert (training.micro_batch_size, training.global_batch_size) == (micro, 16384)
    assert config.num_microbatches(16384, 8) == 16384 // 8 // micro
    assert config.recompute.recompute_num_layers == interval
    assert (model.seq_length, model.padded_vocab_size(50257)) == (512, VOCABULARY)
    # Its 300 billion tokens are less than the whole run by less than a batch.
    assert 0 <= config.total_samples() * 512 - 3e11 < 16384 * 512


@pytest.mark.parametrize("billions", TABLES)
def test_parameters(billions: int) -> None:
    model = shipped(f"gpt_{billions}b", TABLES[billions][3]).model
    assert parameter_count(model, VOCABULARY) == pytest.approx(billions * 1e9, rel=0.025)
    assert parameter_count(model, 50257, include_padding=True) == parameter_count(model, VOCABULARY)


@pytest.mark.parametrize(
    ("name", "world"),
    [*((f"gpt_{billions}b", row[3]) for billions, row in TABLES.items()), ("gpt_124m_axonn", 12)],
)
def test_what_all_of_them_share(name: str, world: int) -> None:
    config = shipped(name, world)
    parallel, offload, optimizer = config.parallel, config.offload, config.optimizer
    assert (parallel.pipeline_schedule, parallel.pipeline_limit) == ("message-driven", None)
    assert parallel.use_tp_pp_dp_mapping and parallel.rank_order == "tp-pp-dp"
    assert offload.optimizer_cpu_offload
    assert (offload.offload_bucket_size, offload.offload_coarsening) == (4_000_000, 4)
    assert (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2) == (0.001, 0.9, 0.999)
    assert optimizer.weight_decay == 0.01
    assert config.precision.predivide_loss and config.precision.grad_dtype == "float16"
    assert config.notices == (
        "overlap_grad_reduce is on by default (Megatron-LM: off); the numbers are the same",
    )


def test_the_validation_runs_on_12_ranks_and_on_one() -> None:
    config = shipped("gpt_124m_axonn", 12)
    assert config.data_parallel_size(12) == 6
    assert config.num_microbatches(480, 6) == 10
    assert parameter_count(config.model, 50257) == pytest.approx(124e6, rel=0.01)
    alone = (
        "--pipeline-model-parallel-size 1 --pipeline-schedule 1f1b "
        "--optimizer-cpu-offload false --predivide-loss false"
    )
    argv = ["--config", str(FOLDER / "gpt_124m_axonn.yaml"), *alone.split()]
    assert resolve(parse(argv, paths=PATHS), 1).num_microbatches(480, 1) == 60
