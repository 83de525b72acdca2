"""Machines of the papers: plans on them, links with the papers' placement of ranks, and fitting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.config import parse, resolve
from megatron.data_parallel.bucket_plan import bucket_elements
from pretrain_gpt import GRADIENT_PATHS
from tools.planner.course import Links, Setting
from tools.planner.plan import Plan
from tools.planner.simulation import SimulatedStep, simulate
from tools.planner.site import Link, Site, read_site

REPO = Path(__file__).resolve().parents[3]
SITES = REPO / "scripts" / "site"
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Machine:
    """A site with one paper's software.

    `efficiency` and `reached` are the shares of a GPU's peak and of a node's network rate that the
    software reaches; `half_size` is that of `products.ShapeLaw`; `blocking` tells whether AxoNN's
    messages keep both their GPUs from computing.
    """

    site: str
    gpu: str | None
    efficiency: float
    reached: float
    blocking: bool = True
    half_size: float = 0.0

    @property
    def facts(self) -> Site:
        """The site with the two shares of this machine."""
        found = read_site(SITES, self.site, self.gpu)
        return replace(
            found,
            efficiency=self.efficiency,
            network_efficiency=self.reached,
            half_size=self.half_size,
        )

    def plan(self, flags: str, world: int) -> Plan:
        """Return the plan of a run on `world` ranks."""
        config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), world)
        return Plan.of(
            config,
            world=world,
            path=GRADIENT_PATHS[config.gradient.grad_path],
            vocabulary=config.data.vocab_size or GPT2_VOCABULARY,
            cap=bucket_elements(config, config.data_parallel_size(world)),
            site=self.facts,
        )

    def setting(self, flags: str, world: int) -> Setting:
        """Return the setting in which a run on `world` ranks is simulated."""
        plan = self.plan(flags, world)
        return Setting.of(plan.grid, plan.site, [stage.rank for stage in plan.stages])

    def with_its_share(self) -> Link:
        """Return the link of a GPU while all GPUs of its node send.

        AxoNN's pipelines use neighbouring GPUs, so the GPUs of a node belong to as many
        data-parallel groups.
        """
        facts = self.facts
        rate = facts.nics_per_node * facts.nic_rate * facts.network_efficiency
        return Link(facts.nic_latency, rate / facts.gpus_per_node)

    def axonn(self) -> Links:
        """Return AxoNN's links: all-reduces and messages get a GPU's share of its node's rate."""
        return Links(self.with_its_share(), self.with_its_share(), blocking=self.blocking)


def single(setting: Setting) -> SimulatedStep:
    """Return the step of a run that has one kind of step."""
    steps = simulate(setting)
    assert len(steps) == 1, "a dense run"
    return steps[0]


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of a monotonic function in [low, high], by the Illinois algorithm."""
    at_low, at_high = function(low), function(high)
    assert at_low * at_high <= 0, "the bounds enclose it"
    x = low
    for _ in range(60):
        x = high - at_high * (high - low) / (at_high - at_low)
        found = function(x)
        if abs(found) < 1e-6 * abs(at_low - at_high) or abs(found) < 1e-9:
            break
        if found * at_high < 0:
            low, at_low = high, at_high
        else:
            at_low /= 2
        high, at_high = x, found
    return x
