"""Figure 5 of SAMO: the batch time that pruning saves of VGG-19 and WideResnet-101 on Summit.

    t(G) = c b + max(0, T(G) - hidden),  b = 128 / G,  T(G) = 2 (G - 1) / G x bytes / rate + latency

Every GPU has the whole network, so that an all-reduce of 16-bit gradients is all that is sent.
Rates are those of the machine that SAMO's table II made; figure 5 makes no constant. The paper
prints two ranges and no batch time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from megatron.parallel.dims import ParallelDims
from tools.planner.replay import samo
from tools.planner.replay.image_networks import SLOWER, ImageNetwork, network
from tools.planner.replay.machines import Machine
from tools.planner.replay.rows import ReplayRow, ReplayTable
from tools.planner.site import Site

GPUS = (16, 32, 64, 128)
BATCH = 128
SPARSITY = Fraction(9, 10)
WIDTH = 2
"""Bytes of a gradient."""
RANGES = {"vgg19": (18.0, 44.0), "wide_resnet101": (7.0, 12.0)}
"""Percent of AxoNN's batch time saved (section VI-B), least and most over `GPUS`."""
BACKWARD = 2 / 3
"""Share of computing that is backward."""


@dataclass(frozen=True, kw_only=True)
class ReplayedImageRun:
    """Data-parallel training of one network.

    `image` is the seconds of computing for an image, c. `compression` is the seconds of compressing
    and expanding in a step for a parameter. `hidden` is the share of computing that hides sending.
    """

    network: ImageNetwork
    site: Site
    image: float
    compression: float
    hidden: float = 0.0

    def computing(self, gpus: int) -> float:
        """Return the seconds c b of forward and backward of a GPU's images."""
        return self.image * BATCH / gpus

    def sending(self, gpus: int, *, pruned: bool) -> float:
        """Return the seconds T of an all-reduce of all gradients, or of those that exist."""
        entries = self.network.stored(SPARSITY) if pruned else self.network.parameters
        link = self.site.link(ParallelDims(tp=1, dp=gpus, pp=1), "dp")
        return link.ring(2 * (gpus - 1) / gpus * WIDTH * entries, gpus, rounds=2)

    def step(self, gpus: int, *, pruned: bool) -> float:
        """Return the seconds t of a batch."""
        computing = self.computing(gpus)
        exposed = self.sending(gpus, pruned=pruned) - self.hidden * computing
        own = self.compression * self.network.parameters if pruned else 0.0
        return computing + own + max(exposed, 0.0)

    def saved(self, gpus: int) -> float:
        """Return percent of the dense batch time that pruning saves."""
        return 100 * (1 - self.step(gpus, pruned=True) / self.step(gpus, pruned=False))

    def needed(self, gpus: int, saved: float) -> float:
        """Return the seconds of computing with which pruning would save `saved` percent.

        Nothing hides sending.
        """
        dense, pruned = (self.sending(gpus, pruned=pruned) for pruned in (False, True))
        own = self.compression * self.network.parameters
        return (dense - pruned - own) / (saved / 100) - dense


def runs(
    machine: Machine,
    *,
    image: float | None = None,
    compression: float | None = None,
    hidden: float = 0.0,
) -> dict[str, ReplayedImageRun]:
    """Return the runs of both networks by name.

    Args:
        machine: fitted to table II.
        image: seconds of computing for an image of VGG-19; None for its FLOPs at the share of peak
            that the passes of the machine reach. WideResnet-101 takes `SLOWER` times as long.
        compression: seconds for a parameter; None for its bytes at the rate of the memory.
        hidden: the share of computing that hides sending.
    """
    site = machine.facts
    image = image or network("vgg19").training_flops / (site.peak * site.efficiency)
    return {
        name: ReplayedImageRun(
            network=network(name),
            site=site,
            image=image * (SLOWER if name == "wide_resnet101" else 1.0),
            compression=compression or samo.COMPRESSION / site.memory_rate,
            hidden=hidden,
        )
        for name in RANGES
    }


def figure_8_compression(machine: Machine) -> float:
    """Return the most seconds a parameter that figure 8 prints for compressing and expanding.

    It prints percent of AxoNN's batch of GPT-3 2.7B, whose length is simulated; SAMO compresses
    after the backward of each microbatch.
    """
    model = samo.MODELS["2.7B"]
    own = model.parameters / model.stages(True)
    found: list[float] = []
    for gpus, (*_, computing) in samo.FIGURE_8.items():
        microbatches = model.batch * model.stages(True) / gpus
        lost = -computing / 100 * samo.run(machine, model, gpus, compressed=False).total
        found.append(lost / microbatches / own)
    return max(found)


def figure_5(machine: Machine) -> ReplayTable:
    """Return the table; `machine` is fitted to table II."""
    found = runs(machine)
    rows = [
        ReplayRow(what=f"{run.network.title}, {gpus} GPUs", unit="%", digits=1,
            simulated=run.saved(gpus), low=RANGES[name][0], high=RANGES[name][1])
        for name, run in found.items() for gpus in GPUS
    ]  # fmt: skip
    return ReplayTable(
        name="SAMO, figure 5: batch time saved over AxoNN, two image networks",
        machine="Summit, as SAMO ran it",
        constants={},
        rows=[*rows, *_order(found)],
        notes=list(_notes(machine, found)),
    )


def _order(found: dict[str, ReplayedImageRun]) -> Iterator[ReplayRow]:
    """Yield the claims about order; the ends of both ranges are taken for 16 and 128 GPUs."""
    vgg, wide = (RANGES[name] for name in ("vgg19", "wide_resnet101"))
    least = min(found["vgg19"].saved(g) / found["wide_resnet101"].saved(g) for g in GPUS)
    ends = sorted(a / b for a, b in zip(vgg, wide, strict=True))
    yield ReplayRow(
        what="saving of VGG-19 over that of WideResnet-101, least", unit="ratio",
        simulated=least, low=round(ends[0], 2), high=round(ends[1], 2), claim=1.0)  # fmt: skip
    for name, run in found.items():
        few, many = RANGES[name]
        yield ReplayRow(what=f"{run.network.title}, saving on 128 GPUs over that on 16",
            unit="ratio", measured=many / few, simulated=run.saved(128) / run.saved(16),
            claim=1.0)  # fmt: skip


def _notes(machine: Machine, found: dict[str, ReplayedImageRun]) -> Iterator[str]:
    vgg, site = found["vgg19"], machine.facts
    yield (
        f"{_inside(found)} of the eight savings are inside the paper's ranges. The paper prints no "
        "batch time, and its two ranges hold for 16 to 128 GPUs together"
    )
    yield (
        "VGG-19 saves more than WideResnet-101 on every number of GPUs, and both save more on more "
        "GPUs, as the paper says, but the differences are smaller than the paper's"
    )
    rate = site.nics_per_node * site.nic_rate * site.network_efficiency / 1e9
    yield (
        f"the constants are those of table II, 256 GPUs. VGG-19 computes at {site.efficiency:.3f} "
        f"of peak, WideResnet-101 {SLOWER} times as long (section VI-B; {_flops_ratio(found):.2f} "
        "times by FLOPs). A ring passes each node once, so that an all-reduce has the network of a "
        f"whole node, {rate:.1f} GB/s"
    )
    times = ", ".join(
        f"{1e3 * vgg.computing(gpus):.1f} + {1e3 * vgg.sending(gpus, pruned=False):.1f}"
        for gpus in GPUS
    )
    yield (
        f"a dense batch of VGG-19 takes {times} ms of computing and sending. The computing is too "
        "short: the products of GPT-3 13B reach that share of peak, convolutions of 8 images and "
        "fewer do not"
    )
    yield (
        "nothing hides an all-reduce, as in the tables above. If all of backward hid it, the "
        f"savings would be {_listed(runs(machine, hidden=BACKWARD))}"
    )
    price = figure_8_compression(machine)
    yield (
        f"compressing and expanding take {1e12 * vgg.compression:.1f} ps a parameter, by the rate "
        f"of the memory. Figure 8's 8 to 12 % of a batch are {1e12 * price:.0f} ps at most, with "
        f"which the savings would be {_listed(runs(machine, compression=price))}. The optimizer is "
        "not counted"
    )
    yield _what_the_ranges_need(found)
    image = vgg.needed(128, RANGES["vgg19"][1])
    made = runs(machine, image=image)
    yield (
        f"with the time of an image made from VGG-19's 44 % on 128 GPUs ({1e3 * image:.0f} ms), "
        f"the savings would be {_listed(made)}, {_inside(made)} of eight inside, that one among "
        "them. So computing does not grow with the images of a GPU in the paper's figure as it "
        "does here"
    )


def _what_the_ranges_need(found: dict[str, ReplayedImageRun]) -> str:
    needed = {
        name: [run.needed(gpus, saved) for gpus, saved in zip((16, 128), RANGES[name], strict=True)]
        for name, run in found.items()
    }
    few, many = (w / v for v, w in zip(needed["vgg19"], needed["wide_resnet101"], strict=True))
    told = " and ".join(
        f"{1e3 * first:.0f} to {1e3 * last:.0f} ms ({found[name].network.title})"
        for name, (first, last) in needed.items()
    )
    return (
        f"with these all-reduces the paper's ranges need computing of {told}, 16 to 128 GPUs: "
        f"{few:.1f} to {many:.1f} times as long for WideResnet-101, where the paper says nearly "
        "1.5. All-reduces that nothing hides cannot give both"
    )


def _flops_ratio(found: dict[str, ReplayedImageRun]) -> float:
    vgg, wide = (found[name].network.training_flops for name in ("vgg19", "wide_resnet101"))
    return wide / vgg


def _inside(found: dict[str, ReplayedImageRun]) -> int:
    return sum(
        low <= round(run.saved(gpus), 6) <= high
        for name, run in found.items()
        for low, high in [RANGES[name]]
        for gpus in GPUS
    )


def _listed(found: dict[str, ReplayedImageRun]) -> str:
    """Return the savings of both networks as text."""
    return " and ".join(
        f"{', '.join(f'{run.saved(gpus):.0f}' for gpus in GPUS)} % ({run.network.title})"
        for run in found.values()
    )
