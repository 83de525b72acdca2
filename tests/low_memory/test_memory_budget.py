"""The search of `--memory-budget`: the fastest settings that fit, a refusal, and what resumes."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from megatron.config import Config, parse, resolve, to_yaml
from megatron.config.byte_size import parse_bytes, show_bytes
from megatron.errors import ConfigError, DataError
from megatron.low_memory.memory_budget import BudgetSearch, within_budget
from megatron.low_memory.planned_memory import planned_column
from megatron.low_memory.recomputed_flops import recomputed_share
from megatron.parallel.dims import ParallelDims
from pretrain_gpt import GRADIENT_PATHS
from pretrain_gpt import main as pretrain_gpt
from pretrain_translation import TRANSLATION_TASK
from pretrain_vision import VISION_TASK
from tests.low_memory.test_ledger import GPT, PP, STILL, TP, VOCABULARY, gpt, translation, vision
from tests.test_pretrain_gpt import alone
from tests.tiers import sampled
from tests.training.harness import metrics_of

pytestmark = pytest.mark.push

SIZES = {"gpt": (VOCABULARY,), "vision": (), "translation": (90, 70)}
VISION = (
    "--mock-data --num-layers 16 --width-factor 0.5 --img-h 32 --img-w 32 --num-classes 10 "
    "--micro-batch-size 8 --train-iters 5 --lr 1e-2 --optimizer sgd"
)
TRANSLATION = (
    "--data-path none --encoder-layers 3 --decoder-layers 2 --embed-dim 32 --max-tokens 100 "
    "--micro-batch-size 1 --train-iters 5 --lr 1e-3"
)
BF16_STATES = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


def config_of(flags: str, *, world: int = 1, task: type[Config] | None = None) -> Config:
    if task is None:
        return resolve(parse(f"{GPT} {flags}".split(), paths=GRADIENT_PATHS), world)
    return resolve(parse(flags.split(), paths=GRADIENT_PATHS, task=task), world)


def search_of(config: Config, *, world: int = 1) -> BudgetSearch:
    path = GRADIENT_PATHS[config.gradient.grad_path]
    return BudgetSearch(config, path, world, SIZES[config.task])


def fullest(config: Config, world: int) -> int:
    """The planned peak of the fullest of all ranks, each of which is planned."""
    parallel = config.parallel
    dims = ParallelDims.from_world(
        world,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.rank_order,
    )
    path, sizes = GRADIENT_PATHS[config.gradient.grad_path], SIZES[config.task]
    return max(
        planned_column(config, dims, path, rank=rank, vocabularies=sizes).total
        for rank in range(world)
    )


@pytest.mark.parametrize("flags", ["", TRANSLATION, VISION], ids=["gpt", "translation", "vision"])
def test_the_peak_is_planned_for_the_device_that_the_flag_names(flags: str) -> None:
    task = {TRANSLATION: TRANSLATION_TASK.config, VISION: VISION_TASK.config}.get(flags)
    on_cpu, on_gpu = (
        fullest(config_of(f"{flags} --grad-path samo --device {device}", task=task), 1)
        for device in ("cpu", "cuda")
    )
    assert on_cpu != on_gpu, "indices and scratch of the two differ"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2_000_000_000), ("1.5GB", 1_500_000_000), ("500MB", 500_000_000), ("7kB", 7000),
        ("1GiB", 1 << 30), ("0.5MiB", 1 << 19), ("3TB", 3 * 10**12),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["2", "2G", "2gb", "2 GB", "-1GB", "0GB", "1e9MB", "GB", "inf"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"memory_budget: .* is no size of memory; give"):
        parse([*GPT.split(), f"--memory-budget={text}"], paths=GRADIENT_PATHS)


@pytest.mark.parametrize("count", [1, 999, 1001, 999_999, 10**6, 13_087_744, 10**9 + 1, 10**13 + 1])
def test_a_shown_size_is_read_as_the_next_thousandth_of_its_unit(count: int) -> None:
    shown = parse_bytes(show_bytes(count))
    assert count <= shown <= count * 1.001 + 1


# ---- the choice ----------------------------------------------------------------------------------

MICROBATCHES = ("", "--micro-batch-size 2", "--micro-batch-size 1")
STRATEGIES = (
    "",
    "--recompute-granularity no-norm",
    "--recompute-granularity ops",
    "--recompute-granularity selective",
    "--recompute-granularity full",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
    *(
        f"--recompute-granularity full --recompute-method block --recompute-num-layers {count}"
        for count in (1, 2, 3)
    ),
    "--recompute-granularity residual-star",
    "--recompute-granularity residual-star --recompute-num-layers 2",
    "--recompute-granularity residual-star --recompute-num-layers 4",
)
STATES = ("", BF16_STATES, f"{BF16_STATES} --main-params-dtype bf16")
OFFLOADS = ("", "--optimizer-cpu-offload")


def by_hand(base: str) -> list[tuple[int, float]]:
    """Planned peak and recomputed share of every combination that the parser accepts."""
    found: list[tuple[int, float]] = []
    for parts in itertools.product(MICROBATCHES, STRATEGIES, STATES, OFFLOADS):
        try:
            config = config_of(f"{base} {' '.join(parts)}")
        except ConfigError:
            continue
        found.append((fullest(config, 1), recomputed_share(config, SIZES["gpt"])))
    return found


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_the_choice_is_the_fastest_that_fits_of_all_combinations(precision: str) -> None:
    base = "--micro-batch-size 4 --global-batch-size 8 --offload-bucket-size 128 --device cuda"
    base = f"{base} {precision}"
    combinations = by_hand(base)
    search = search_of(config_of(base))
    assert sorted(each.peak for each in search.candidates) == sorted(p for p, _ in combinations)
    assert len(combinations) == 3 * 13 * (6 if precision else 2)
    peaks = sorted({peak for peak, _ in combinations})
    flops, places = [], []
    for budget in (*peaks, peaks[-1] + 1):
        chosen = search.choose(budget)
        assert chosen.peak <= budget and chosen.peak == fullest(chosen.config, 1)
        least = min(share for peak, share in combinations if peak <= budget)
        assert chosen.flops == pytest.approx(1 + least, abs=1e-6)
        flops.append(chosen.flops)
        places.append(search.candidates.index(chosen))
    # A larger budget never takes a slower setting.
    assert flops == sorted(flops, reverse=True) and places == sorted(places, reverse=True)
    assert places[-1] == 0 and search.candidates[0].changes == {}
    assert [search.candidates.index(each) for each in search.front] == sorted(set(places))


def test_ties_prefer_fp32_states_then_larger_microbatches_and_offload_comes_last() -> None:
    base = "--micro-batch-size 4 --global-batch-size 8 --offload-bucket-size 128 --bf16"
    base += " --device cuda"
    free = [each for each in search_of(config_of(base)).candidates if each.flops == 1]
    places = [
        (
            each.config.offload.optimizer_cpu_offload,
            ("fp32", "bf16").index(each.config.optimizer.exp_avg_dtype),
            ("fp32", "bf16").index(each.config.optimizer.main_params_dtype),
            -each.config.training.micro_batch_size,
            (None, "no-norm", "ops").index(each.config.recompute.recompute_granularity),
        )
        for each in free
    ]
    assert len(places) == 2 * 3 * 3 * 3 and places == sorted(places)


def test_where_nothing_fits_the_smallest_peak_is_named_and_fits() -> None:
    config = config_of("--micro-batch-size 4 --global-batch-size 8")
    search = search_of(config)
    least = min(each.peak for each in search.candidates)
    with pytest.raises(ConfigError) as refused:
        search.choose(least - 1)
    text = str(refused.value)
    assert f"smallest planned peak is {show_bytes(least)}" in text and "\n" not in text
    named = text.rpartition("--memory-budget ")[2]
    assert search.choose(parse_bytes(named)).peak == least
    assert search.choose(least).flags in text


def test_settings_of_the_command_line_stay_except_the_microbatch() -> None:
    base = "--micro-batch-size 4 --global-batch-size 8 --bf16 --device cuda"
    fixed = "--recompute-granularity ops --exp-avg-dtype fp32 --optimizer-cpu-offload false"
    for candidate in search_of(config_of(f"{base} {fixed}")).candidates:
        assert candidate.changes.keys() <= {
            "micro_batch_size", "exp_avg_sq_dtype", "main_params_dtype",
        }  # fmt: skip
    free = dataclasses.replace(config_of(f"{base} {fixed}"), from_flags=frozenset())
    names = set().union(*(each.changes for each in search_of(free).candidates))
    assert {"recompute_granularity", "exp_avg_dtype", "optimizer_cpu_offload"} <= names
    assert min(each.flops for each in search_of(free).candidates) == 1


def test_what_the_file_recomputes_is_recomputed_at_least() -> None:
    config = dataclasses.replace(
        config_of("--micro-batch-size 4 --recompute-granularity full"), from_flags=frozenset()
    )
    search = search_of(config)
    assert search.candidates[0].changes == {}
    assert {each.flops >= search.candidates[0].flops for each in search.candidates} == {True}


@pytest.mark.parametrize(
    ("world", "flags", "offloads"),
    [
        (4, f"{TP} {PP} --sequence-parallel --bf16", {False, True}),
        (4, f"{PP} --bf16 --use-distributed-optimizer", {False}),
        (4, f"{PP} --num-layers-per-virtual-pipeline-stage 1", {False}),
        (2, "--grad-path samo --fp16", {False, True}),
        (2, "--grad-path radius --radius-interval 4 --bf16", {False}),
    ],
)
def test_peaks_are_those_of_the_fullest_rank_on_grids_and_paths(
    world: int, flags: str, offloads: set[bool]
) -> None:
    sizes = "--micro-batch-size 2 --global-batch-size 16 --device cuda"
    config = config_of(f"{sizes} {flags}", world=world)
    search = search_of(config, world=world)
    for candidate in (*search.candidates[::7], *search.front):
        assert candidate.peak == fullest(candidate.config, world), candidate.flags
        assert candidate.config.training.global_batch_size == 16
    found = {each.config.offload.optimizer_cpu_offload for each in search.candidates}
    assert found == offloads


def test_states_of_a_cpu_are_not_offloaded_to_the_same_memory() -> None:
    for flags, offered in (
        ("--device cpu", {False}),
        ("--device cpu --optimizer-cpu-offload", {True}),
        # Without --device a run takes a GPU where there is one.
        ("", {False, True}),
    ):
        candidates = search_of(config_of(f"--bf16 {flags}")).candidates
        offloads = {each.config.offload.optimizer_cpu_offload for each in candidates}
        assert len(candidates) > 1 and offloads == offered


def test_batch_normalizations_keep_their_images() -> None:
    plain = search_of(config_of(VISION, task=VISION_TASK.config))
    assert {each.config.training.micro_batch_size for each in plain.candidates} == {8}
    # SGD has one moment, and an fp32 run cannot be offloaded.
    assert {each.config.optimizer.exp_avg_dtype for each in plain.candidates} == {"fp32", "bf16"}
    assert {each.config.optimizer.exp_avg_sq_dtype for each in plain.candidates} == {"fp32"}
    groups = f"{VISION} --simulated-micro-batch-size 2"
    simulated = search_of(config_of(groups, task=VISION_TASK.config))
    assert {each.config.training.micro_batch_size for each in simulated.candidates} == {8, 4, 2}
    for candidate in simulated.front:
        assert candidate.peak == fullest(candidate.config, 1)
        assert candidate.config.values()["simulated_micro_batch_size"] == 2


def test_a_translation_keeps_its_packs() -> None:
    search = search_of(config_of(TRANSLATION, task=TRANSLATION_TASK.config))
    granularities = {each.config.recompute.recompute_granularity for each in search.candidates}
    assert granularities == {None, "full"}
    assert {each.config.training.micro_batch_size for each in search.candidates} == {1}
    assert search.front[-1].peak == min(fullest(each.config, 1) for each in search.candidates)


@pytest.mark.parametrize(
    ("recompute", "setting"),
    [
        ("", "vision_backbone_type: vgg19 has no"),
        ("--recompute-granularity every", "recompute_granularity: every has no"),
    ],
)
def test_a_network_without_planned_memory_is_refused(recompute: str, setting: str) -> None:
    flags = VISION.replace("--num-layers 16", "--vision-backbone-type vgg19 --memory-budget 1GB")
    config = config_of(f"{flags} {recompute}", task=VISION_TASK.config)
    with pytest.raises(ConfigError, match=f"memory_budget: {setting}.*; leave out --memory-budget"):
        within_budget(config, GRADIENT_PATHS["dense"], world=1, vocabularies=())


# ---- beside the other columns of the ledger ------------------------------------------------------


SHARES = [
    *(f"{STILL} {strategy}" for strategy in STRATEGIES[3:8]),
    *(f"--attention-dropout 0 {strategy}" for strategy in STRATEGIES[4:6]),
    f"{STILL} {STRATEGIES[-1]}",
    f"--attention-dropout 0 {STRATEGIES[-2]}",
]


@pytest.mark.parametrize("flags", sampled(SHARES, SHARES[::4]))
def test_shares_of_a_gpt_are_those_that_are_tracked(flags: str) -> None:
    flops = gpt(flags, columns=["tracked"], flops=True).flops
    assert flops is not None
    share = recomputed_share(config_of(flags), SIZES["gpt"])
    # A fused attention computes its scores once more in backward, which the formula leaves out.
    assert share == pytest.approx(flops.recomputed / (flops.forward + flops.backward), rel=0.03)


@pytest.mark.parametrize("strategy", ["residual", "residual-star --recompute-num-layers 2"])
def test_shares_of_a_wide_resnet_are_those_that_are_tracked(strategy: str) -> None:
    flops = vision(f"--recompute-granularity {strategy}", columns=["tracked"]).flops
    base = VISION.replace("--num-layers 16", "--num-layers 10")
    config = config_of(f"{base} --recompute-granularity {strategy}", task=VISION_TASK.config)
    assert flops is not None
    share = flops.recomputed / (flops.forward + flops.backward)
    # The first convolution runs again with its block; in ten layers it has a share that counts.
    assert recomputed_share(config, ()) == pytest.approx(share, rel=0.1)


@pytest.mark.full
def test_the_share_of_a_translation_is_the_one_that_is_tracked() -> None:
    full = "--recompute-granularity full"
    flops = translation(f"{full} --dropout 0.1", columns=["tracked"], flops=True).flops
    config = config_of(f"{TRANSLATION} {full}", task=TRANSLATION_TASK.config)
    assert flops is not None
    share = flops.recomputed / (flops.forward + flops.backward)
    assert recomputed_share(config, SIZES["translation"]) == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize("part", sampled([0.9, 0.75, 0.6], [0.6]))
def test_the_planned_peak_of_a_choice_agrees_with_the_tracked_one(part: float) -> None:
    base = f"{STILL} --micro-batch-size 4 --global-batch-size 8 --bf16"
    search = search_of(config_of(base))
    chosen = search.choose(int(part * search.candidates[0].peak))
    columns = gpt(f"{base} {chosen.flags}", columns=["planned", "tracked"]).columns
    assert columns["planned"].total == chosen.peak
    assert columns["tracked"].total == pytest.approx(chosen.peak, rel=0.1)


TRACKED = [
    *["", *(f"--recompute-granularity {name}" for name in ("no-norm", "ops"))],
    *(
        f"--recompute-granularity {name} --recompute-num-layers {count}"
        for name in ("residual", "residual-star")
        for count in (1, 2)
    ),
]


@pytest.mark.parametrize("strategy", sampled(TRACKED, TRACKED[1::4]))
def test_planned_peaks_of_a_wide_resnet_agree_with_tracked_ones(strategy: str) -> None:
    flags = f"--num-layers 16 --width-factor 2 --micro-batch-size 8 {strategy}"
    columns = vision(flags, columns=["planned", "tracked"]).columns
    assert columns["planned"].total == pytest.approx(columns["tracked"].total, rel=0.05)


# ---- runs ----------------------------------------------------------------------------------------

RUN = (
    f"{GPT.replace('--train-iters 5', '--train-iters 6')} --micro-batch-size 4 --bf16 "
    "--global-batch-size 8 --device cpu --eval-iters 0 --log-interval 1"
)


def test_a_run_trains_as_with_the_flags_typed_and_a_resumed_one_keeps_the_choice(
    tmp_path: Path,
) -> None:
    search = search_of(resolve(parse(RUN.split(), paths=GRADIENT_PATHS), 1))
    chosen = search.choose(int(0.55 * search.candidates[0].peak))
    assert chosen.changes_numbers and chosen.flags
    size, least = show_bytes(chosen.peak), show_bytes(search.front[-1].peak)

    def run(name: str, flags: str) -> str:
        done = alone(f"{flags} --run-dir {name}", tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run("searched", f"{RUN} --memory-budget {size}")
    assert f"the run takes {chosen.flags}, with a planned peak of {size} instead" in said
    run("typed", f"{RUN} {chosen.flags}")
    run("stopped", f"{RUN} --memory-budget {size} --exit-interval 3")
    said = run("stopped", f"{RUN} --memory-budget {least}")
    assert (
        f"memory_budget {least}: the resumed run keeps what {size} chose, {chosen.flags}," in said
    )
    run("repeated", "--config searched/config.yaml")
    losses = metrics_of(tmp_path / "typed")
    assert len(losses) == 6
    for name in ("searched", "stopped", "repeated"):
        assert metrics_of(tmp_path / name) == losses, name
        file = tmp_path / name / "config.yaml"
        kept = parse(["--config", str(file)], paths=GRADIENT_PATHS)
        assert kept.training.memory_budget == size
        assert kept.recompute == chosen.config.recompute
        assert kept.optimizer == chosen.config.optimizer
        assert kept.training.micro_batch_size == chosen.config.training.micro_batch_size


def resumed(flags: str, *, chosen: str, on: int, before: int) -> Config:
    """The configuration with which `on` ranks resume a run whose settings `before` ranks chose."""
    path, sizes = GRADIENT_PATHS["dense"], SIZES["gpt"]
    saved = within_budget(config_of(chosen, world=before), path, world=before, vocabularies=sizes)
    again = config_of(flags, world=on)
    return within_budget(again, path, world=on, vocabularies=sizes, saved=saved)


def test_a_saved_microbatch_is_cut_to_what_other_ranks_get() -> None:
    config = config_of("--micro-batch-size 8 --global-batch-size 8")
    flags = f"--global-batch-size 8 --memory-budget {show_bytes(fullest(config, 1))}"
    one, more = f"{flags} --micro-batch-size 8", f"{flags} --micro-batch-size 1"
    assert resumed(more, chosen=one, on=1, before=1).training.micro_batch_size == 8
    assert resumed(more, chosen=one, on=4, before=1).training.micro_batch_size == 2


def test_a_resumed_run_drops_what_its_command_line_replaces() -> None:
    flags = "--micro-batch-size 2 --global-batch-size 8 --bf16 --device cuda"
    saved = f"{flags} --memory-budget 1GB"
    full = f"{saved} --recompute-granularity full --recompute-method uniform"
    full = f"{full} --recompute-num-layers 1"
    kept = resumed(saved, chosen=full, on=1, before=1).recompute
    assert (kept.recompute_granularity, kept.recompute_num_layers) == ("full", 1)
    again = resumed(f"{saved} --recompute-granularity ops", chosen=full, on=1, before=1).recompute
    assert (again.recompute_granularity, again.recompute_method) == ("ops", None)
    assert again.recompute_num_layers is None
    offload = f"{saved} --optimizer-cpu-offload"
    assert resumed(saved, chosen=offload, on=1, before=1).offload.optimizer_cpu_offload
    sharded = f"{saved} --use-distributed-optimizer"
    assert not resumed(sharded, chosen=offload, on=1, before=1).offload.optimizer_cpu_offload


def test_a_resumed_run_says_that_it_needs_more_than_its_budget() -> None:
    flags = "--global-batch-size 8 --micro-batch-size 1 --use-distributed-optimizer"
    size = show_bytes(fullest(config_of(flags, world=8), 8))
    line = f"{flags} --memory-budget {size}"
    assert f"more than {size}" in resumed(line, chosen=line, on=1, before=8).notices[-1]
    assert "more than" not in resumed(line, chosen=line, on=8, before=8).notices[-1]


def test_a_dry_run_without_the_data_leaves_the_choice_to_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    absent = ["--mock-data", "false", "--data-path", "nowhere/x", "--vocab-size", "none"]
    line = [*RUN.split(), *absent, "--dry-run", "--memory-budget", "1GB"]
    assert pretrain_gpt(line) == DataError.exit_code
    assert pretrain_gpt([*line, "--check-paths", "false"]) == 0
    assert "the run chooses when it starts" in capsys.readouterr().err


def test_a_budget_that_nothing_fits_is_one_line_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = search_of(resolve(parse(RUN.split(), paths=GRADIENT_PATHS), 1))
    folder = tmp_path / "run"
    assert pretrain_gpt([*RUN.split(), "--memory-budget", "1kB", "--run-dir", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the smallest planned peak is {show_bytes(search.front[-1].peak)}" in line
    assert not (folder / "config.yaml").exists()


def test_a_dry_run_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    search = search_of(resolve(parse(RUN.split(), paths=GRADIENT_PATHS), 1))
    chosen = search.choose(search.candidates[0].peak - 1)
    budget = show_bytes(chosen.peak)
    assert pretrain_gpt([*RUN.split(), "--dry-run", "--memory-budget", budget]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"note: memory_budget {budget}: the run takes {chosen.flags},")
    written = chosen.config.with_values({"memory_budget": budget})
    assert said.out == to_yaml(written)
