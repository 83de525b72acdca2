"""Tests of SAMO's compressed storage on a GPU.

Results equal the CPU's bit for bit, without a wait of the host or a copy, past 2^31 entries. This
module does not import pytest.
"""

from __future__ import annotations

import torch

from samo.layout import BitmapStore, CompressedLayout
from tests.gpu.sizes import fitting
from tests.gpu.test_training_on_cuda import no_host_sync


def test_kernels_equal_plain_torch(device: torch.device) -> None:
    if device.type != "cuda":
        return  # tests/samo has Triton's interpreter run the same comparisons
    from tests.samo.kernel_comparisons import COMPARISONS

    torch.manual_seed(0)
    for comparison in COMPARISONS:
        comparison(device)


def a_step(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return, on the CPU, all results of a layout for fixed masks, parameters and gradients."""
    torch.manual_seed(5)
    shapes = {"matrix": (fitting(1031, 131), 777), "window": (64, 32, 3, 3), "whole": (50, 7)}
    params = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    grads = {name: torch.randn(2, *shape).to(dtype) for name, shape in shapes.items()}
    masks = {name: torch.rand(params[name].numel()) < 0.1 for name in ("matrix", "window")}
    layout = CompressedLayout(masks, device=device)
    made = []
    for name, value in params.items():
        leaf = torch.nn.Parameter(value.to(device))
        flat = torch.zeros(layout.numel(name, leaf), device=device)
        sums = torch.full_like(flat, 9.0)
        layout.bind(name, flat, (leaf,))
        made.append(leaf.detach().clone())
        layout.gather(name, grads[name][0].to(device), sums)
        layout.gather_add(name, grads[name][1].to(device), sums)
        flat.sub_(sums * 0.01)
        layout.scatter(name, flat, leaf.detach())
        made += [flat, sums, leaf.detach()]
        mask = layout.mask(name)
        made += [] if mask is None else [mask, masks[name]]
    made.append(torch.tensor(bytearray(layout.fingerprint().encode())))
    return [tensor.cpu() for tensor in made]


def test_layout_is_the_one_of_the_cpu(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wanted, found = (a_step(on, dtype) for on in (torch.device("cpu"), device))
        for mine, expected in zip(found, wanted, strict=True):
            assert torch.equal(mine, expected), dtype


def test_a_step_waits_for_nothing_and_makes_no_copy(device: torch.device) -> None:
    entries = fitting(3_000_000, 50_000)
    layout = CompressedLayout({"w": torch.rand(entries) < 0.1}, device=device)
    leaf = torch.nn.Parameter(torch.randn(entries, device=device, dtype=torch.bfloat16))
    grad = torch.randn_like(leaf.detach())
    flat, sums = torch.zeros(2, layout.numel("w", leaf), device=device).unbind()

    def step() -> None:
        with no_host_sync(device):
            layout.bind("w", flat, (leaf,))
            layout.gather("w", grad, sums)
            layout.gather_add("w", grad, sums)
            layout.scatter("w", flat, leaf.detach())

    step()  # The first calls compile the kernels.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        assert torch.cuda.max_memory_allocated(device) == before
    assert int(leaf.detach().count_nonzero()) == int(flat.count_nonzero()) > 0.09 * entries


def test_more_entries_than_32_bits_count(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < 32 * 2**30:
        print("left out: it takes a GPU with 32 GiB free")
        return
    entries = 2**31 + 3_000_017
    mask = torch.zeros(entries, dtype=torch.bool)
    mask[::1000] = True
    mask[-1000:] = True
    index = BitmapStore(mask, device)
    dense = torch.zeros(entries, dtype=torch.bfloat16, device=device)
    index.expand(torch.ones(index.stored, device=device), dense)
    dense[-10:] = 2.0
    found = torch.zeros(index.stored, device=device)
    index.compress(dense, found, add=True)
    assert bool((found[:-10] == 1).all()) and bool((found[-10:] == 2).all())
    assert sum(int(piece.count_nonzero()) for piece in dense.split(2**28)) == index.stored
    assert torch.equal(dense[2**31 :].cpu() != 0, mask[2**31 :])
