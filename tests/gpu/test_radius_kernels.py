"""Radius' kernels on a GPU: equal to plain torch, without a wait of the host, past 2^31 entries. No
pytest in here either."""

from __future__ import annotations

from typing import Literal

import torch

from megatron.data_parallel.reducer import ReducedGrad
from megatron.optimizer.update_rules import AdamW, Hyper
from megatron.sparse.selection import draw_seeded, select_largest
from radius.bitmap_index import BitmapIndex
from tests.gpu.sizes import fitting
from tests.gpu.test_training_on_cuda import no_host_sync

RULE = AdamW(beta1=0.9, beta2=0.95, eps=1e-8)
HYPER = Hyper(t=3, lr=1e-2, weight_decay=0.0)


def test_kernels_equal_plain_torch(device: torch.device) -> None:
    if device.type != "cuda":
        return  # tests/radius and tests/sparse have Triton's interpreter run the same comparisons
    from tests.radius.kernel_comparisons import COMPARISONS as MOVING
    from tests.sparse.kernel_comparisons import COMPARISONS as CHOOSING

    torch.manual_seed(0)
    for comparison in (*CHOOSING, *MOVING):
        comparison(device)


def test_index_is_the_one_of_the_cpu(device: torch.device) -> None:
    length = fitting(9_000_000, 1_100_000)
    values = torch.randn(length)
    values[::3] = values[1::3]
    there, here = BitmapIndex(length, torch.device("cpu")), BitmapIndex(length, device)
    for index, mine in ((there, values), (here, values.to(device))):
        index.choose(0, select_largest(mine[: length // 2], length // 5))
        index.choose(length // 2, draw_seeded(length // 2, 12345, seed=1, step=1, name="w"))
        index.choose(777_777, select_largest(mine[777_777:999_999], 1000))
    again = [
        int(index.choose_again(70_001, select_largest(mine[1:99_000], 9000))[1])
        for index, mine in ((there, values), (here, values.to(device)))
    ]
    assert again[0] == again[1] > 0
    assert torch.equal(here.packed(0, length), there.packed(0, length))
    border = fitting(2**22, 2**20)
    ranges = [(5, 1_000_000), (border - 1, border + 5)]
    ours, wanted = here.flushed(ranges), there.flushed(ranges)
    assert ours.runs == wanted.runs and ours.numel == wanted.numel
    sent, expected = torch.empty(ours.numel, device=device), torch.empty(ours.numel)
    ours.gather(values.to(device), sent)
    wanted.gather(values, expected)
    assert torch.equal(sent.cpu(), expected)


def test_nothing_waits_for_the_device(device: torch.device) -> None:
    length = fitting(5_000_000, 20_000)
    values = torch.randn(length, device=device)
    index = BitmapIndex(length, device)
    weight, mean, square = torch.rand(3, length, device=device).unbind()
    for _ in range(2):  # the second time no kernel is compiled
        with no_host_sync(device):
            for start, stop in ((0, 1000), (1000, 9000), (9000, length)):
                part = values[start:stop]
                index.choose(start, select_largest(part, part.numel() // 3))
            flushed = index.flushed([(1000, 9000)])
            for chosen in (index, flushed):
                out = torch.empty(chosen.numel, device=device)
                rest: Literal["zero", "frozen"] = "frozen" if chosen.runs else "zero"
                counts = torch.ones_like(out) if rest == "frozen" else None
                chosen.gather(values, out)
                chosen.clear(values.clone())
                reduced = ReducedGrad(
                    values=out, index=chosen, unselected=rest, steps_accumulated=counts
                )
                chosen.apply(RULE, reduced, weight, (mean, square), HYPER, factor=1.0)


def test_more_entries_than_32_bits_count(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < 64 * 2**30:
        print("left out: it takes a GPU with 64 GiB free")
        return
    length = 2**31 + 3_000_017
    values = torch.empty(length, device=device).normal_()
    index = BitmapIndex(length, device)
    index.choose(0, select_largest(values, length // 10))
    assert index.numel == int(index.bits.counts.sum()) == length // 10
    sent = torch.empty(index.numel, device=device)
    index.gather(values, sent)
    index.clear(values)
    left = max(float(piece.abs().max()) for piece in values.split(2**28))
    assert left <= float(sent.abs().min())
    last = values[-1000:].clone()
    index.choose(length - 1000, select_largest(last, 10))
    index.clear(values)
    assert int((values[-1000:] != last).sum()) == 10
    weight, mean, square = (torch.zeros(length, device=device) for _ in range(3))
    reduced = ReducedGrad(values=sent[: index.numel], index=index)
    index.apply(RULE, reduced, weight, (mean, square), HYPER, factor=1.0)
    moved = sum(int(piece.count_nonzero()) for piece in weight.split(2**28))
    assert moved == index.numel
    assert int(weight[2**31 :].count_nonzero()) > 0
