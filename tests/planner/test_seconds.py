"""The cost model, the machines' facts, and the papers' numbers that these come from."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse, resolve
from megatron.data_parallel.bucket_plan import bucket_elements
from megatron.errors import ConfigError
from megatron.memory_estimate import state_bytes
from megatron.model.flops import flops_per_token
from megatron.parallel.dims import ParallelDims
from pretrain_gpt import GRADIENT_PATHS
from tests.planner.grids import planned
from tests.test_repo import SITES
from tools.planner.plan import Plan
from tools.planner.products import Product, ShapeLaw, layer_products
from tools.planner.replay import shapes
from tools.planner.seconds import (
    PassSeconds,
    evaluation_seconds,
    pass_seconds,
    pipeline_seconds,
)
from tools.planner.site import Link, Site, read_site, with_efficiency
from tools.planner.traffic import tensor_traffic
from tools.planner.updates import update_seconds

SITE = SITES[0].parent
REPO = SITE.parents[1]
MODEL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --mock-data "
    "--vocab-size 1000 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --lr 1e-3 "
    "--bf16"
)


def plan_of(flags: str, world: int, site: str = "perlmutter", gpu: str | None = None) -> Plan:
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), world)
    return Plan.of(
        config,
        world=world,
        path=GRADIENT_PATHS[config.gradient.grad_path],
        vocabulary=config.data.vocab_size or 50257,
        cap=bucket_elements(config, config.data_parallel_size(world)),
        site=read_site(SITE, site, gpu),
    )


# ---- machines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SITES, ids=lambda file: file.stem)
def test_every_site_has_its_facts(file: Path) -> None:
    site = read_site(SITE, file.stem)
    assert site.peak > site.peak_fp32 > 0 and 0 < site.efficiency < 1
    assert 0 < site.network_efficiency <= 1


def test_kinds_of_gpu_share_what_is_not_said_of_one() -> None:
    small, large = (read_site(SITE, "perlmutter", gpu) for gpu in (None, "A100-80GB"))
    assert small.gpu == "A100-40GB" and small.memory < large.memory / 2 * 1.01
    assert small.peak == large.peak and small.memory_rate < large.memory_rate


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("NIC_GBPS=fast", ["NIC_GBPS=fast", "number above 0"]),
        ("NIC_GBPS=-1", ["NIC_GBPS=-1"]),
        ("NIC_GBPS=nan", ["NIC_GBPS=nan"]),
        ("DEVICE=tpu", ["DEVICE=tpu", "cpu or cuda"]),
        (": ${NIC_GBPS:=25}", ["has no NIC_GBPS"]),
    ],
)
def test_a_site_file_that_is_wrong_is_named(line: str, words: list[str], tmp_path: Path) -> None:
    key = line.partition("=")[0].strip(": ${")
    kept = [
        each
        for each in (SITE / "vista.env").read_text().splitlines()
        if not each.startswith(f"{key.rstrip(':')}=")
    ]
    (tmp_path / "mine.env").write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError) as error:
        read_site(tmp_path, "mine")
    assert all(word in str(error.value) for word in ("site mine", *words)), str(error.value)


def test_groups_that_cross_nodes_share_the_nics() -> None:
    site = read_site(SITE, "perlmutter")
    whole = site.nics_per_node * site.nic_rate * site.network_efficiency
    inside, across = ParallelDims(tp=4, dp=2, pp=1), ParallelDims(tp=1, dp=8, pp=1)
    assert site.link(inside, "tp").rate == site.link_rate
    assert site.link(across, "dp").rate == whole
    assert site.link(inside, "dp").rate == pytest.approx(whole / 4)
    pairs = ParallelDims(tp=2, dp=4, pp=1)
    assert site.link(pairs, "dp").rate == pytest.approx(whole / 2)
    assert site.message(ParallelDims(tp=1, dp=4, pp=2)).rate == site.nic_rate


class CountedDivisor(int):
    """A number that counts how often another one is divided by it."""

    count = 0

    def __rfloordiv__(self, other: int) -> int:
        self.count += 1
        return other // int(self)


def test_a_link_of_many_ranks_is_found_in_one_pass_over_them() -> None:
    site, dims = read_site(SITE, "perlmutter"), ParallelDims(tp=1, dp=256, pp=1)
    per_node = CountedDivisor(site.gpus_per_node)
    assert replace(site, gpus_per_node=per_node).link(dims, "dp") == site.link(dims, "dp")
    assert per_node.count == dims.world_size


def test_a_message_takes_the_links_between_its_stages() -> None:
    site = read_site(SITE, "perlmutter")
    within = Link(site.link_latency, site.link_rate)
    assert site.message(ParallelDims(tp=1, dp=1, pp=4)) == within
    assert site.message(ParallelDims(tp=1, dp=2, pp=4, order="tp-pp-dp")) == within
    # Of stages 0 and 1 on a node, 2 and 3 on the next one, one boundary of three is between nodes,
    # and two pipelines cross it side by side.
    mean = site.message(ParallelDims(tp=1, dp=2, pp=4))
    between = Link(site.nic_latency, site.nics_per_node * site.nic_rate / 2)
    for size in (0, 10**6, 10**9):
        wanted = (2 * within.message(size) + between.message(size)) / 3
        assert mean.message(size) == pytest.approx(wanted)
    # A single pipeline has all NICs of a node for its one crossing.
    alone = site.message(ParallelDims(tp=1, dp=1, pp=8)).message(10**9)
    whole = Link(site.nic_latency, site.nics_per_node * site.nic_rate).message(10**9)
    assert alone == pytest.approx((6 * within.message(10**9) + whole) / 7)


@pytest.mark.parametrize("site", ["summit", "perlmutter"])
@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 8, 6), (2, 4, 3), (1, 12, 2), (3, 5, 4)])
def test_the_order_trades_messages_for_gradients(site: str, tp: int, dp: int, pp: int) -> None:
    """Pipelines on neighbouring ranks send messages as fast at least, and sums as slowly."""
    facts = read_site(SITE, site)
    usual, mapped = (
        ParallelDims(tp=tp, dp=dp, pp=pp, order=order) for order in ("tp-dp-pp", "tp-pp-dp")
    )
    size = 10**8
    assert facts.message(mapped).message(size) <= facts.message(usual).message(size)
    sums = [facts.link(dims, "dp").ring(size, dp, rounds=2) for dims in (usual, mapped)]
    assert sums[0] <= sums[1]
    assert facts.link(mapped, "tp") == facts.link(usual, "tp")


# ---- a step -------------------------------------------------------------------------------------


def test_a_dense_step_of_radius_2b_is_what_the_site_was_fitted_to() -> None:
    """Table 3 of the Radius paper: 888 ms of computation, 965 ms of all-reduce. These two made the
    site's shares, so this tests arithmetic, not the model."""
    config = f"--config {SITE.parents[1]}/configs/gpt_2.0b.yaml --overlap-grad-reduce false"
    seconds = plan_of(config, 64, gpu="A100-80GB").seconds
    assert seconds.compute == pytest.approx(0.888, rel=0.01)
    assert seconds.exposed == pytest.approx(seconds.reduce)
    assert seconds.reduce == pytest.approx(0.965, rel=0.02)


def test_overlap_hides_what_backward_is_long_enough_for() -> None:
    flags = f"--config {SITE.parents[1]}/configs/gpt_2.0b.yaml"
    dense, radius = (plan_of(f"{flags} {more}", 64).seconds for more in ("", "--grad-path radius"))
    assert 0 < dense.exposed < dense.reduce
    # The first fifth of the run is dense, of the rest two fifths are sent.
    assert radius.reduce == pytest.approx((0.2 + 0.8 * 0.4) * dense.reduce, rel=0.05)
    assert radius.exposed < (0.2 + 0.8 * 0.4) * dense.exposed


def test_overlap_hides_gathers_that_forward_is_long_enough_for() -> None:
    flags = f"--config {SITE.parents[1]}/configs/gpt_2.0b.yaml --use-distributed-optimizer"
    plain, ours = (
        plan_of(f"{flags} {more}", 64).seconds for more in ("", "--overlap-param-gather")
    )
    assert ours.reduce == plain.reduce and 0 < ours.exposed < plain.exposed
    assert ours.total - ours.exposed == pytest.approx(plain.total - plain.exposed)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [4, 8, 64])
def test_the_bubble_is_that_of_narayanan(stages: int, microbatches: int) -> None:
    grid = planned(f"{MODEL} --pipeline-model-parallel-size {stages}", stages, vocabulary=1000)
    each = PassSeconds(1e-3, 2e-3, 0.0)
    found = pipeline_seconds(grid, [each] * stages, Link(0.0, 1e30), microbatches)
    assert found == pytest.approx((microbatches + stages - 1) * each.total)
    turns = planned(
        f"{MODEL} --pipeline-model-parallel-size {stages} "
        "--num-layers-per-virtual-pipeline-stage 1",
        stages,
        vocabulary=1000,
    )
    chunks = 8 // stages
    found = pipeline_seconds(turns, [each] * stages, Link(0.0, 1e30), microbatches)
    assert found == pytest.approx((microbatches + (stages - 1) / chunks) * each.total)


def test_a_limit_below_the_stages_makes_message_driven_wait() -> None:
    flags = f"{MODEL} --pipeline-model-parallel-size 4 --pipeline-schedule message-driven"
    each, link = [PassSeconds(1e-3, 2e-3, 0.0)] * 4, Link(0.0, 1e30)
    full, two = (
        pipeline_seconds(planned(f"{flags} {more}", 4, vocabulary=1000), each, link, 64)
        for more in ("", "--pipeline-limit 2")
    )
    assert full == pytest.approx((64 + 3) * each[0].total)
    # Four stages, and two microbatches on the way at a time: half of the stages work.
    assert two > 1.8 * full


def test_recomputation_costs_a_forward() -> None:
    plain, full = (
        plan_of(f"{MODEL} {more}", 4).seconds.compute
        for more in ("", "--recompute-granularity full")
    )
    assert 1.2 < full / plain < 4 / 3  # the head is not made again


@pytest.mark.parametrize(
    ("recompute", "times"),
    [
        ("residual", 1),
        ("residual --recompute-num-layers 4", 1),
        ("every", 1),
        ("residual-star", 1),
        ("residual-star --recompute-num-layers 4", (8 + 8 - 2) / 8),
        ("ops", 0),
        ("no-norm", 0),
    ],
)
def test_layers_that_run_again_by_operators_cost_a_forward_each(
    recompute: str, times: float
) -> None:
    flags = f"{MODEL} --tensor-model-parallel-size 4"
    plain, full, found = (
        plan_of(f"{flags} {more}", 4)
        for more in (
            "",
            "--recompute-granularity full",
            f"--recompute-granularity {recompute}",
        )
    )
    more = found.seconds.compute - plain.seconds.compute
    assert more == pytest.approx(times * (full.seconds.compute - plain.seconds.compute))
    again = tensor_traffic(full.grid, 0).again
    assert tensor_traffic(found.grid, 0).again == pytest.approx(times * again)


def test_efficiency_can_be_said() -> None:
    site: Site = with_efficiency(read_site(SITE, "summit"), 0.25)
    assert site.efficiency == 0.25
    with pytest.raises(ConfigError):
        with_efficiency(site, 0.0)


def test_an_offloaded_optimizer_leaves_4_phi_and_14_a_bucket_entry() -> None:
    """AxoNN, V-B, has 16, where the widened gradient is as long as the bucket and not half."""
    flags = f"{MODEL} --grad-reduce-in-bf16 --optimizer-cpu-offload --offload-bucket-size 4096"
    grid = planned(flags, 1, vocabulary=1000)
    rank = grid.rank()
    found = state_bytes(grid, rank)
    entries = sum(param.numel for param in rank.params.values())
    held = sum(bucket.numel for bucket in rank.buckets)
    assert found.total == 2 * entries + 2 * held + 14 * 4096
    assert sum(found.host.values()) == 12 * held


def offloaded(flags: str, world: int) -> float:
    """Seconds of an update of a million entries on Summit."""
    plan = plan_of(f"{MODEL} --optimizer-cpu-offload {flags}", world, "summit")
    return update_seconds(plan.grid, plan.site, 1e6)


def test_offloaded_states_come_and_go_at_once() -> None:
    """12 bytes of Adam's and 8 of SGD's an entry, each way at 50 GB/s; six GPUs share 340 GB/s of
    host memory. Half of what the device takes adds to that: 30 bytes at 900 GB/s, and 22."""
    alone, node = (offloaded("", ranks) for ranks in (1, 6 - 2))
    assert alone == pytest.approx(12e6 / 50e9 + 30e6 / 900e9 / 2)
    assert node == pytest.approx(2 * 4 * 12e6 / 340e9 + 30e6 / 900e9 / 2)
    assert offloaded("--optimizer sgd", 1) == pytest.approx(8e6 / 50e9 + 22e6 / 900e9 / 2)
    # A CPU takes turns: there, back, and its update of the bytes that it moves.
    grid = planned(f"{MODEL} --optimizer-cpu-offload", 1, vocabulary=1000)
    local = read_site(SITE, "local")
    turns = update_seconds(grid, local, 1e6)
    assert turns == pytest.approx(2 * 12e6 / local.host_link_rate + 30e6 / local.memory_rate)


def test_a_pipeline_of_axonns_12b_lies_within_a_node() -> None:
    """And its six groups of 8 ranks share a node's NICs, as its 4.32 s of all-reduces say."""
    flags = f"--config {SITE.parents[1]}/configs/gpt_12b.yaml"
    mapped, usual = (
        plan_of(f"{flags} --use-tp-pp-dp-mapping {on}", 48, "summit") for on in ("true", "false")
    )
    assert plan_of(flags, 48, "summit").grid.dims == mapped.grid.dims
    nodes = [{rank // 6 for rank in line} for line in mapped.grid.dims.lines("pp")]
    assert all(len(each) == 1 for each in nodes)
    assert {len({r // 6 for r in line}) for line in usual.grid.dims.lines("pp")} == {6}
    site = mapped.site
    assert site.message(mapped.grid.dims) == Link(site.link_latency, site.link_rate)
    assert site.message(usual.grid.dims).rate == site.nics_per_node * site.nic_rate / 6
    assert mapped.seconds.reduce == pytest.approx(4.32, rel=0.15)
    assert usual.seconds.reduce == pytest.approx(mapped.seconds.reduce / 6, rel=0.05)
    assert mapped.seconds.bubble < usual.seconds.bubble
    # The same bytes and the same memory of a rank; a node has one rank of each stage.
    assert mapped.traffic == usual.traffic and mapped.needed == usual.needed
    assert mapped.host == sum(sum(stage.host.values()) for stage in mapped.stages)
    assert usual.host == 6 * max(sum(stage.host.values()) for stage in usual.stages)


@pytest.mark.parametrize("coarsening", [1, 4])
def test_updates_follow_sums_unless_gradients_are_clipped(coarsening: int) -> None:
    flags = (
        f"--config {SITE.parents[1]}/configs/gpt_12b.yaml --global-batch-size 2048 "
        f"--micro-batch-size 1 --overlap-grad-reduce false --offload-coarsening {coarsening}"
    )
    follows, waits = (
        plan_of(f"{flags} --clip-grad {clip}", 48, "summit").seconds for clip in (0, 1)
    )
    held = 12e9 / 6
    assert waits.optimizer > held * 12 / (340e9 / 2 / 6)
    assert follows.exposed == pytest.approx(waits.exposed)
    # Sums and updates take about as long, and all but the first and the last piece go together.
    both = follows.exposed + follows.optimizer
    assert max(waits.exposed, waits.optimizer) < both < 1.15 * max(waits.exposed, waits.optimizer)


def test_sums_that_are_made_again_wait_and_those_of_backward_hide() -> None:
    flags = f"{MODEL} --tensor-model-parallel-size 4"
    plain, again = (plan_of(f"{flags} {more}", 4) for more in ("", "--recompute-granularity full"))
    seconds = [
        [pass_seconds(plan.grid, plan.site, 0, hides_sums=hides).tensor for hides in (True, False)]
        for plan in (plain, again)
    ]
    # Of this small model no sum hides: forward's, as many of backward, as many again.
    assert seconds[0][0] < seconds[0][1] and seconds[1][0] > seconds[0][0]
    sums = tensor_traffic(again.grid, 0)
    link = again.site.link(again.grid.dims, "tp")
    made_again = link.ring(sums.again, 4, rounds=sums.again_rounds)
    assert seconds[1][1] - seconds[0][1] == pytest.approx(made_again)


def test_a_sequence_that_is_cut_waits_as_long_for_its_sums() -> None:
    flags = f"{MODEL} --tensor-model-parallel-size 4 --recompute-granularity full"
    whole = tensor_traffic(plan_of(flags, 4).grid, 0)
    cut = tensor_traffic(plan_of(f"{flags} --sequence-parallel", 4).grid, 0)
    # A sum is a scattered sum and a gather: forward has as many of both, and backward gathers the
    # inputs of two matrices a layer, and of the head, once more.
    assert whole.forward_rounds == cut.forward_rounds
    assert whole.again_rounds == cut.again_rounds == 2 * 2 * 8
    assert cut.backward_rounds - whole.backward_rounds == 2 * 8 + 1


def test_evaluations_go_forward_alone() -> None:
    flags = f"{MODEL} --eval-interval 50 --eval-iters 3"
    full = plan_of(f"{flags} --recompute-granularity full", 4)
    each = evaluation_seconds(full.grid, full.site)
    assert each == pytest.approx(16 * pass_seconds(full.grid, full.site, 0).forward)
    assert full.queue.evaluating == pytest.approx(3 * 3 * each), "twice, and the test set"
    for interval, times in ((30, 4 + 1), (1000, 1 + 1)):
        flags = f"{MODEL} --recompute-granularity full --eval-interval {interval} --eval-iters 3"
        found = plan_of(flags, 4).queue.evaluating
        assert found == pytest.approx(times * 3 * each), "the last step is always evaluated"


def test_a_full_validation_is_told_to_be_unknown() -> None:
    said = "an evaluation takes --eval-iters batches here"
    data = MODEL.replace("--mock-data", "--data-path corpus")
    plain, full = plan_of(data, 4), plan_of(f"{data} --full-validation", 4)
    assert not any(said in note for note in plain.notes)
    assert any(said in note for note in full.notes)


def test_stages_that_take_unequal_times_are_played_as_they_are() -> None:
    grid = planned(f"{MODEL} --pipeline-model-parallel-size 2", 2, vocabulary=1000)
    slow, fast = PassSeconds(2e-3, 4e-3, 0.0), PassSeconds(1e-3, 2e-3, 0.0)
    found = pipeline_seconds(grid, [fast, slow], Link(0.0, 1e30), 64)
    assert found == pytest.approx(64 * slow.total + fast.total)


def test_batch_steps_and_disk_are_those_of_the_run() -> None:
    flags: Any = f"{MODEL} --save-interval 30 --keep-last 2"
    plan = plan_of(flags, 4)
    assert plan.tokens == 64 * 128 and plan.steps == 100 and plan.microbatches == 16
    assert plan.checkpoint == 12 * plan.parameters and plan.checkpoints == 2
    retaining: Any = f"{MODEL} --save-interval 10 --save-retain-interval 50"
    assert plan_of(retaining, 4).checkpoints == 3, "steps 50 and 100, and one while it is replaced"
    assert plan.queue.total > plan.queue.training == pytest.approx(100 * plan.seconds.total)


# ---- the law of shapes ---------------------------------------------------------------------------


def test_products_of_a_layer_have_the_flops_of_the_formula() -> None:
    model = parse(["--config", str(REPO / "configs" / "gpt_124m.yaml")], paths=GRADIENT_PATHS).model
    tokens = 4 * model.seq_length
    for tp in (1, 2, 4):
        made = sum(each.flops for each in layer_products(model, sequences=4, tp=tp))
        head = 6.0 * model.hidden_size * model.padded_vocab_size(50257)
        layer = (flops_per_token(model, 50257) - head) / model.num_layers / 3
        assert made * tp == pytest.approx(layer * tokens)


def test_the_law_halves_a_dimension_at_its_constant_and_is_off_at_0() -> None:
    assert ShapeLaw(0).slowness([Product(3, 5, 7), Product(1, 2, 3)]) == 1
    assert ShapeLaw(100).slowness([Product(100, 1e12, 1e12)]) == pytest.approx(2)
    slow = [ShapeLaw(64).slowness([Product(m, 512, 512)]) for m in (64, 512, 4096)]
    assert slow == sorted(slow, reverse=True)


def test_the_page_of_the_law_has_the_fit_and_the_papers_errors() -> None:
    """The papers' errors with one number are those of the page of all tables."""
    folder = REPO / "tools" / "planner" / "replay"
    found = json.loads((folder / "shapes.json").read_text())
    fits = (shapes.product_fit(0), shapes.best_fit())
    for fit, told in zip(fits, found["products"], strict=True):
        assert (told["half"], told["share"]) == (fit.half, pytest.approx(fit.share))
        assert told["mean"] == pytest.approx(fit.mean)
    assert fits[1].mean < fits[0].mean / 3
    assert (folder / "shapes.md").read_text() == "\n".join(shapes.lines(found)) + "\n"
    committed = json.loads((folder / "results.json").read_text())["tables"]
    tables = {each["name"]: each for each in committed}
    for name, errors in found["papers"][0].items():
        if name in tables:
            rows = [row for row in tables[name]["rows"] if row["kind"] == "predicted"]
            for shares, mean in zip((False, True), errors, strict=True):
                mine = [abs(row["error"]) for row in rows if (row["unit"] == "%") == shares]
                assert not mine or statistics.mean(mine) == pytest.approx(mean, rel=1e-3), name
    # The default follows the page: both errors must fall before a site sets the law's constant.
    ends = [papers["every predicted row"] for papers in found["papers"]]
    adopted = all(after <= before for before, after in zip(*ends, strict=True))
    set_by = [site.stem for site in SITES if read_site(SITE, site.stem).half_size]
    assert bool(set_by) == adopted
