"""`--radius-*`: defaults, refusals with their way out, the parts that the path builds and plans."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest

from megatron.config import GPTConfig, parse, resolve, to_yaml
from megatron.data_parallel.bucket_plan import slice_alignment
from megatron.errors import ConfigError
from megatron.sparse.shard import FlatShard
from megatron.sparse.sizes import counted_bytes
from pretrain_gpt import GRADIENT_PATHS
from radius.index import IndexPart, num_selected
from radius.path import RadiusConfig, RadiusPath
from tests.planner.shapes import rank_of
from tests.radius.toys import alone

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 1000 --lr 1e-3 --grad-path radius"
)


def read(flags: str = "", base: str = BASE) -> GPTConfig:
    return parse([*base.split(), *flags.split()], paths=GRADIENT_PATHS)


def refused(flags: str, base: str = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        read(flags, base)
    assert str(caught.value).isprintable()
    return str(caught.value)


def options(flags: str = "") -> RadiusConfig:
    found = read(flags).extensions["radius"]
    assert isinstance(found, RadiusConfig)
    return found


def test_the_defaults_are_the_papers() -> None:
    found = options()
    assert (found.radius_density, found.radius_interval) == (0.4, 200)
    chosen = (found.radius_schedule, found.radius_select, found.radius_residual)
    assert chosen == ("paper", "update", "separate")
    assert found.start(1000) == 200 and found.start(1001) == 201


@pytest.mark.parametrize(
    ("flags", "total", "start"),
    [
        ("--radius-start-iter 7", 1000, 7),
        ("--radius-start-fraction 0.07", 100, 7),
        ("--radius-start-fraction 0", 1000, 0),
        ("--radius-start-fraction 0.05", 1001, 51),
    ],
)
def test_the_start_is_a_step_or_a_share_of_the_run(flags: str, total: int, start: int) -> None:
    assert options(flags).start(total) == start


def test_what_is_saved_reads_back_the_same(tmp_path: Path) -> None:
    config = read("--radius-density 0.1 --radius-schedule rolling --radius-select seeded")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse(["--config", str(file)], paths=GRADIENT_PATHS) == config


@pytest.mark.parametrize("density", ["0", "-0.1", "1.5"])
def test_a_density_outside_its_range_is_refused(density: str) -> None:
    said = refused(f"--radius-density {density}")
    assert said == (f"--radius-density: {float(density)} is out of range; must be in (0, 1]")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--radius-density 10%", "10% is 0.1"),
        ("--radius-density nan", "must be a finite number"),
        ("--radius-interval 0", "--radius-interval: 0 is out of range; must be at least 1"),
        ("--radius-interval 1.5", "is not an integer"),
        ("--radius-start-iter -1", "must be at least 0"),
        ("--radius-start-fraction 1.2", "must be in [0, 1]"),
        ("--radius-schedule papers", "did you mean paper?"),
        ("--radius-select largest", "must be one of update, seeded, gradient"),
        ("--radius-residual seperate", "did you mean separate?"),
        ("--radius-densty 0.4", "did you mean --radius-density?"),
        (
            "--radius-start-iter 5 --radius-start-fraction 0.1",
            "Radius has one start (radius_start_iter is 5, radius_start_fraction is 0.1); give one "
            "of them",
        ),
        ("--radius-start-iter 1001", "radius_start_iter 1001 is past the last of 1000 steps"),
        ("--radius-interval 2000", "--radius-interval 999 would do"),
        ("--radius-interval 300 --radius-start-iter 950", "--radius-interval 249 would do"),
        (
            "--radius-interval 999 --radius-start-iter 1000",
            "so that none would send a part; start earlier",
        ),
        (
            "--radius-schedule rolling --adam-beta1 0",
            "or give --radius-schedule paper",
        ),
        (
            "--radius-schedule rolling --exp-avg-dtype int8",
            "give bf16 instead, or --radius-schedule paper",
        ),
        ("--radius-schedule rolling --exp-avg-sq-dtype int8", "are rounded again in every step"),
        ("--fp16", "give --accumulate-allreduce-grads-in-fp32, or --radius-residual none"),
        ("--optimizer sgd --sgd-weight-decay coupled", "give --sgd-weight-decay decoupled"),
        ("--optimizer sgd --sgd-nesterov", "without --sgd-nesterov, or another --grad-path"),
        (
            "--grad-wire int8 --radius-residual none",
            "give --grad-wire bf16, or --grad-wire-feedback false",
        ),
        (
            "--radius-schedule rolling --use-distributed-optimizer",
            "give --radius-select seeded or gradient, or --radius-schedule paper",
        ),
        ("--fp16 --radius-schedule rolling", "give --accumulate-allreduce-grads-in-fp32"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(flags: str, said: str) -> None:
    assert said in refused(flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--radius-interval 999",
        "--radius-interval 2000 --radius-density 1",
        "--skip-loss-spikes 4",
        "--bf16 --grad-reduce-in-bf16",
        "--fp16 --accumulate-allreduce-grads-in-fp32",
        "--fp16 --radius-residual none",
        "--fp16 --radius-density 1",
        "--grad-wire bf16",
        "--grad-wire int4",
        "--grad-wire int4 --grad-wire-feedback false --radius-residual none",
        "--radius-schedule rolling --optimizer sgd --adam-beta1 0",
        "--radius-start-iter 0 --radius-interval 1",
        "--use-distributed-optimizer",
        "--use-distributed-optimizer --radius-schedule rolling --radius-select seeded",
        "--use-distributed-optimizer --radius-schedule rolling --radius-select gradient",
        "--exp-avg-dtype int8 --exp-avg-sq-dtype int8",
        "--radius-schedule rolling --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "--radius-schedule rolling --optimizer sgd --exp-avg-sq-dtype fp32",
    ],
)
def test_what_can_be_is_accepted(flags: str) -> None:
    assert read(flags).gradient.grad_path == "radius"


def test_coupled_decay_is_refused_beside_samo_too() -> None:
    line = BASE.replace("--grad-path radius", "--grad-path samo+radius --samo-sparsity 0.5")
    assert line != BASE
    said = refused("--optimizer sgd --sgd-weight-decay coupled", line)
    assert "sgd_weight_decay is 'coupled'" in said


def test_help_compat_tells_what_is_refused_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help-compat"], paths=GRADIENT_PATHS)
    _, told = capsys.readouterr().out.split("Refused together with --grad-path radius:\n")
    for pair in RadiusPath.refused_pairs:
        assert f"  {pair.name}: {pair.reason}; {pair.instead}\n" in told


def test_a_run_counted_in_samples_is_as_long_as_its_steps() -> None:
    base = BASE.replace("--train-iters 1000", "--train-samples 1000")
    read("--global-batch-size 4", base)
    said = refused("--global-batch-size 8 --radius-start-iter 1", base)
    assert "from 1, where Radius starts, to 124" in said
    # The batch follows from the number of ranks, and is known when the path is built.
    config = resolve(read("--radius-interval 9999", base), 10)
    with pytest.raises(ConfigError, match="to 49, the last but one, is a multiple of it"):
        RadiusPath().build(config, [], alone())
    RadiusPath().build(resolve(read("--radius-interval 40", base), 10), [], alone())


def test_a_run_that_only_evaluates_needs_no_resample() -> None:
    base = BASE.replace("--train-iters 1000 --lr 1e-3", "--skip-train")
    config = read("", base)
    assert config.total_iterations() == 0


def test_its_flags_are_refused_with_a_path_that_has_none() -> None:
    base = BASE.replace("radius", "dense")
    assert "the gradient path dense does not take it" in refused("--radius-density 0.1", base)


@pytest.mark.parametrize("density", ["0.4", "0.1", "0.07", "1e-9", "0.999"])
@pytest.mark.parametrize("length", [1, 7, 100, 1776, 99_999])
@pytest.mark.parametrize("parts", [1, 4, 200])
def test_parts_of_a_tensor_choose_together_what_the_whole_does(
    density: str, length: int, parts: int
) -> None:
    share = Fraction(density)
    whole = IndexPart("w", 64, FlatShard(length, length), num_selected(share, length))
    assert whole.wanted == math.ceil(share * length) >= 1
    cuts = [whole.cut(number, parts, share) for number in range(parts)]
    assert sum(cut.wanted for cut in cuts) == whole.wanted
    assert cuts[0].start == whole.start and cuts[-1].stop == whole.stop
    assert all(a.stop == b.start for a, b in zip(cuts, cuts[1:], strict=False))
    assert all(0 <= cut.wanted <= cut.length for cut in cuts)


SHAPES: dict[str, tuple[int, ...]] = {"a": (100, 10), "b": (7, 3), "bias": (100,)}
BUCKET = 1024 + 64
"""Entries of the matrices' bucket: slices begin at multiples of 64."""
ALIGNED = 1024 + 128
"""Entries of that bucket over a wire with blocks of 128 values."""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"index": 4 * 409, "residual": 4 * BUCKET, "values": 4 * 409}),
        ("--radius-residual none", {"index": 4 * 409, "residual": 0, "values": 4 * 409}),
        ("--bf16 --grad-reduce-in-bf16", {"residual": 4 * BUCKET, "values": 2 * 409}),
        ("--grad-wire int8", {"residual": 4 * ALIGNED, "wire feedback": 4 * ALIGNED}),
        ("--grad-wire int8 --radius-density 1", {"residual": 0, "wire feedback": 8 * ALIGNED}),
        ("--radius-density 1", {"index": 0, "residual": 0, "values": 0}),
        (
            "--radius-schedule rolling --radius-interval 100",
            {"index": 4 * 409, "residual": 4 * BUCKET, "values": 8 * (409 + 7)},
        ),
        ("--device cuda", {"index": 4 * (1024 // 8 + 16), "residual": 4 * BUCKET}),
        ("--radius-select gradient", {"mean gradients": 4 * 1021}),
        ("--radius-select gradient --radius-density 1", {}),
    ],
)
def test_planned_bytes(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: dict[str, int]
) -> None:
    monkeypatch.setattr("radius.index.instruction_sets", tuple)
    config = read(flags)
    alignment, device = slice_alignment(config), config.run.device or "cpu"
    rank = rank_of(SHAPES, device=device, ranks=2, alignment=alignment)
    assert [bucket.numel for bucket in rank.buckets] == [128, 1024 + alignment]
    found = RadiusPath().plan_bytes(config, rank)
    assert {**found.kept, **found.passing} == {**found.kept, **found.passing, **expected}
    passing = {
        "cuda": {"values"},
        "wire": {"encoded values", "decoded values"},
        "gradient": {"mean gradients"} & expected.keys(),
    }
    expected_passing = [kinds for word, kinds in passing.items() if word in flags]
    assert found.passing.keys() == set().union(*expected_passing)


@pytest.mark.parametrize(("density", "index"), [(0.4, 4 * (1024 // 8 + 16)), (0.06, 4 * 62)])
def test_planned_index_of_a_cpu_with_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch, density: float, index: int
) -> None:
    monkeypatch.setattr("radius.index.instruction_sets", lambda: ("AVX2",))
    rank = rank_of(SHAPES, device="cpu")
    planned = RadiusPath().plan_bytes(read(f"--radius-density {density}"), rank)
    assert planned.kept["index"] == index


@pytest.mark.parametrize(("schedule", "resamples"), [("paper", 4), ("rolling", 1)])
def test_planned_traffic_counts_each_kind_of_step(schedule: str, resamples: int) -> None:
    config = read(
        f"--radius-schedule {schedule} --radius-interval 20 --radius-start-iter 30 "
        "--train-iters 110"
    )
    found = RadiusPath().plan_traffic(config, rank_of(SHAPES))
    assert [each.steps for each in found] == [39, resamples, 71 - resamples]
    dense, resample, sparse = (each.bytes_sent(2) for each in found)
    assert dense == resample == 4 * (BUCKET + 128)
    assert sparse == 4 * (128 + 409 + (schedule == "rolling") * 31)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_planned_traffic_of_sharded_states(device: str) -> None:
    schedule = "--radius-interval 20 --radius-start-iter 30"
    flags = f"{schedule} --use-distributed-optimizer --device {device}"
    found = RadiusPath().plan_traffic(read(flags), rank_of(SHAPES, ranks=2, device=device))
    dense, resample, sparse = (each.bytes_sent(2) for each in found)
    gathered = 4 * (64 + 576)
    # A GPU scatters the bucket that is always sent whole.
    vectors = 4 * (64 if device == "cuda" else 128)
    assert dense == vectors + 4 * BUCKET + gathered
    assert sparse == vectors + 4 * 409 + gathered
    # Two small matrices are sent whole, and half of the index.
    assert resample == dense + 4 * (1000 + 21) + 576 // 8
    drawn = RadiusPath().plan_traffic(
        read(f"{flags} --radius-select seeded"), rank_of(SHAPES, ranks=2, device=device)
    )
    assert [each.bytes_sent(2) for each in drawn] == [dense, dense, sparse]


def test_large_tensors_are_counted_in_passes() -> None:
    histogram = 8 * (2**16 + 1)
    assert counted_bytes(2**17, "cuda") == [4 * 2**17]
    assert counted_bytes(2**17 + 1, "cpu") == [histogram] * 2
    assert counted_bytes(2**22 + 1, "cuda") == [histogram] * 4 + [8 * 65, 8 * 2**16]
