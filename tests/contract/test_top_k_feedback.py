"""Replicas that send the largest entries of their changes keep all others (SparseLoCo)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse, resolve
from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.top_k_feedback import TopKFeedback
from megatron.data_parallel.wire_format import BITS, TopKCompression
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.contract.harness import PathCase, Toy, gradients
from tests.planner.grids import grid_of
from tests.ranks import Ranks

EVERY = list(BITS)
CHUNK, K, DECAY = 100, 7, 0.9
LENGTHS = {"long": 1030, "short": 60, "tiny": 5}
"""Ten chunks and a shorter one, one short chunk, and a chunk that is sent whole."""
STARTS = {"long": 0, "short": 1088, "tiny": 1152}
NUMEL = 1216


# ---- a message -----------------------------------------------------------------------------------


def feedback_of(values: str, names: Sequence[str] = tuple(LENGTHS)) -> TopKFeedback:
    slices = {name: Slice(STARTS[name], LENGTHS[name]) for name in names}
    bucket = GradBucket(
        index=0,
        slices=slices,
        grad=torch.zeros(NUMEL),
        weight_decay=True,
        tied=False,
        tp_sharded=False,
    )
    return TopKFeedback(bucket, slices, compression_of(values))


def compression_of(values: str) -> TopKCompression:
    return TopKCompression(chunk=CHUNK, k=K, values=values, decay=DECAY)


def difference_of(seed: int) -> torch.Tensor:
    """Return a change, with gaps of 0."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    found = torch.zeros(NUMEL)
    for name, start in STARTS.items():
        found[start : start + LENGTHS[name]] = values[start : start + LENGTHS[name]]
    return found


@pytest.mark.parametrize("values", EVERY)
def test_what_is_sent_and_what_is_kept_are_the_decayed_rest_and_the_change(values: str) -> None:
    feedback = feedback_of(values)
    for number in range(4):
        change = difference_of(number)
        due = DECAY * feedback.unsent + change
        message = feedback.send(change)
        sent = feedback.mean(message.unsqueeze(0), torch.full((NUMEL,), torch.nan))
        # The subtraction of values below 8, and one more rounding of `due`.
        torch.testing.assert_close(sent + feedback.unsent, due, rtol=0, atol=2 * 8 * 2**-24)
        assert not sent[1030:1088].any() and not sent[1157:].any(), "gaps stay 0"
        if values == "fp32":
            assert torch.equal(feedback.unsent[sent != 0], torch.zeros(int((sent != 0).sum())))
        assert len(message) == compression_of(values).message_bytes(LENGTHS.values())


def test_the_largest_entries_of_each_chunk_are_sent() -> None:
    feedback, change = feedback_of("fp32"), difference_of(5)
    sent = feedback.mean(feedback.send(change).unsqueeze(0), torch.empty(NUMEL))
    for name, start in STARTS.items():
        for at in range(start, start + LENGTHS[name], CHUNK):
            chunk = slice(at, min(at + CHUNK, start + LENGTHS[name]))
            is_sent = sent[chunk] != 0
            assert int(is_sent.sum()) == min(K, chunk.stop - chunk.start)
            assert torch.equal(sent[chunk][is_sent], change[chunk][is_sent])
            sizes = change[chunk].abs()
            if not is_sent.all():
                assert sizes[is_sent].min() >= sizes[~is_sent].max()


def test_messages_are_averaged_over_replicas() -> None:
    replicas = [feedback_of("bf16") for _ in range(3)]
    messages = [each.send(difference_of(seed)) for seed, each in enumerate(replicas)]
    alone = [replicas[0].mean(each.unsqueeze(0), torch.empty(NUMEL)) for each in messages]
    mean = replicas[1].mean(torch.stack(messages), torch.empty(NUMEL))
    torch.testing.assert_close(mean, torch.stack(alone).mean(0), rtol=1e-6, atol=1e-7)
    assert int((mean != 0).sum()) > int((alone[0] != 0).sum()), "replicas send other entries"


def test_a_change_that_is_not_finite_is_sent() -> None:
    change = difference_of(1)
    change[130] = torch.nan
    for values in EVERY:
        feedback = feedback_of(values)
        sent = feedback.mean(feedback.send(change).unsqueeze(0), torch.empty(NUMEL))
        assert not sent[130].isfinite()


@pytest.mark.parametrize("values", EVERY)
def test_7_another_bucketing_sends_the_same_bits(values: str) -> None:
    """Chunks and scales belong to one parameter."""
    found = []
    for buckets in ([list(LENGTHS)], [[name] for name in LENGTHS]):
        sent = torch.zeros(NUMEL)
        for names in buckets:
            feedback = feedback_of(values, names)
            message = feedback.send(difference_of(3))
            sent += feedback.mean(message.unsqueeze(0), torch.empty(NUMEL))
        found.append(sent)
    assert torch.equal(*found)


# ---- rounds --------------------------------------------------------------------------------------

STEPS = 3


def case_of(**options: Any) -> PathCase:
    plain = {"local_steps": STEPS, "outer_momentum": 0.0}
    return PathCase("diloco", plain | options, local=True)


def top_k(values: str, *, chunk: int = CHUNK, k: int = K, decay: float = DECAY) -> dict[str, Any]:
    return {
        "outer_compression": "topk",
        "outer_topk_chunk": chunk,
        "outer_topk_k": k,
        "outer_values": values,
        "outer_decay": decay,
    }


def on_rank_states(groups: ProcessGroups, case: PathCase, steps: int) -> dict[str, torch.Tensor]:
    toy = Toy(groups, case)
    for number in range(steps):
        toy.step([gradients(number, groups.dp.rank)], clip_norm=1.0)
    return {info.name: info.param.detach().clone() for info in toy.infos} | {
        f"unsent/{name}": tensor for name, tensor in toy.own().items()
    }


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_9_all_entries_without_rounding_are_local_steps_without_momentum(
    ranks: Ranks, world: int, fragments: int
) -> None:
    steps = 3 * STEPS
    wanted = ranks.run(world, on_rank_states, case_of(local_fragments=fragments), steps)
    for decay in (0.0, 0.95, 1.0):
        case = case_of(**top_k("fp32", k=CHUNK, decay=decay), local_fragments=fragments)
        found = ranks.run(world, on_rank_states, case, steps)
        for mine, theirs in zip(found, wanted, strict=True):
            unsent = [tensor for name, tensor in mine.items() if name.startswith("unsent/")]
            assert not any(tensor.any() for tensor in unsent), decay
            for name, weight in theirs.items():
                if world <= 2:
                    assert torch.equal(mine[name], weight), (decay, name)
                else:  # A ring adds in another order.
                    close = torch.isclose(mine[name], weight, rtol=1e-5, atol=1e-6)
                    assert close.all(), (decay, name)


def on_rank_laws(groups: ProcessGroups, case: PathCase) -> list[dict[str, torch.Tensor]]:
    """Return of each averaged bucket of matrices what was due, is kept, and moved the anchor."""
    toy = Toy(groups, case)
    local = toy.engine.local_steps
    assert local is not None
    end_step, laws = local.end_step, []

    def watched(iteration: int, weights: Sequence[torch.Tensor]) -> list[GradBucket]:
        watch = [
            (anchor, anchor.feedback, anchor.weights.clone(), weight.clone())
            for anchor, weight in zip(local.anchors, weights, strict=True)
            if isinstance(anchor.feedback, TopKFeedback)
        ]
        due = [DECAY * f.unsent + (was - weight) for _, f, was, weight in watch]
        found = end_step(iteration, weights)
        for (anchor, feedback, was, _), each in zip(watch, due, strict=True):
            if not anchor.is_left:
                laws.append(
                    {
                        "due": each,
                        "kept": feedback.unsent.clone(),
                        "moved": was - anchor.weights,
                        "anchor": anchor.weights.clone(),
                    }
                )
        return found

    local.end_step = watched  # type: ignore[method-assign]
    for number in range(4 * STEPS):
        toy.step([gradients(number, groups.dp.rank)])
    return laws


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("values", ["fp32", "int8", "2bit"])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_3_nothing_of_the_replicas_changes_is_lost(
    ranks: Ranks, world: int, values: str, fragments: int
) -> None:
    case = case_of(**top_k(values), local_fragments=fragments, outer_lr=1.0)
    found = ranks.run(world, on_rank_laws, case)
    assert len(found[0]) >= 4 * fragments
    for laws in zip(*found, strict=True):
        assert all(torch.equal(law["anchor"], laws[0]["anchor"]) for law in laws)
        due, kept = (
            torch.stack([law[kind].double() for law in laws]).sum(0) for kind in ("due", "kept")
        )
        # Anchors below 8 are rounded by 2^-22, and so is their difference from weights.
        moved = world * laws[0]["moved"].double()
        torch.testing.assert_close(moved + kept, due, rtol=0, atol=4 * world * 2**-22)
        assert kept.abs().sum() > 0.1 * due.abs().sum(), "most entries wait"


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4, 8])
def test_at_most_two_thousandths_of_the_bytes_of_dense_training_are_sent(world: int) -> None:
    """Messages of 64 entries of 4,096 in 2 + 1/4 + 1/32 bytes: 0.0356 bytes a parameter.

    Each of R - 1 other replicas gets one in 30 steps. Dense training sends 8 (R - 1) / R bytes.
    """
    config = Path(__file__).resolve().parents[2] / "configs" / "gpt_124m.yaml"
    sent = {}
    for path in ("dense", "diloco --local-steps 30 --outer-compression topk"):
        flags = (
            f"--config {config} --mock-data --train-iters 300 --eval-iters 0 --grad-path {path} "
            "--check-weight-hash-across-dp-replicas-interval 30 --vocab-size 50257"
        )
        resolved = resolve(parse(flags.split(), paths=GRADIENT_PATHS), world)
        grid = grid_of(resolved, world, 50257)
        rank = grid.rank(0, 0)
        traffic = grid.path.plan_traffic(resolved, rank)
        sent[path.split()[0]] = sum(kind.steps * kind.bytes_sent(world) for kind in traffic) / 300
    entries = 64 * (2 + 1 / 4 + 1 / 32) / 4096
    expected = entries * (world - 1) / 30 / (8 * (world - 1) / world)
    # Biases and norms, 0.1 % of the parameters, are averaged in fp32.
    assert sent["diloco"] / sent["dense"] == pytest.approx(expected + 0.001 / 30, rel=0.02)
    assert sent["diloco"] / sent["dense"] < 0.002
