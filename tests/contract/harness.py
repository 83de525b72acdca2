"""A small set of parameters with fully controlled gradients, for the contract tests.

Every contract test runs for the paths of `PATHS`: a new gradient path adds its settings there and
inherits all tests. `tests.contract.pairs` combines them with the other settings and with the number
of ranks. Gradients come out of a real backward of the loss sum(parameter * wanted).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import torch

from megatron.config import GradientConfig, OffloadConfig, OptimizerConfig, ParallelConfig
from megatron.data_parallel.bucket import STATE_BLOCK, ParamInfo
from megatron.data_parallel.bucket_plan import slice_alignment
from megatron.data_parallel.encoded_wire import open_exchange
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.reduce_scatter import ReduceScatterReducer, entries_on_rank
from megatron.data_parallel.reducer import PerEntryState, Step, StepContext
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.cpu_offload import OffloadedOptimizer
from megatron.optimizer.state_formats import StateFormats
from megatron.optimizer.update_rules import AdamW, UpdateRule
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.ranks import grid

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (37, 16),
    "first.weight": (48, 16),
    "first.bias": (48,),
    "norm.weight": (48,),
    "second.weight": (30, 48),
    "second.bias": (30,),
}
TIED = "embedding.weight"
OFFLOAD_BUCKET = 384
"""Bucket size in entries; most buckets consist of several pieces of half this size."""
TOTAL_ITERATIONS = 100
"""Length of the run that a path is told."""


@dataclass(frozen=True)
class PathCase:
    """A gradient path with the settings it is tested under. `lossless`: it sends everything, so
    the reduced gradient is the whole mean; else residuals make up for the rest. `linear`: what it
    sends of a sum of gradients is the sum of what it sends of each; contract 11 holds no other.
    `conserves`: the reduced gradient is the mean of what left the residuals; DeMo's decay forgets a
    part of them and its sign keeps no sizes, so the sums of contracts 2 and 3 hold without both.
    Both are given for values that travel unrounded, and become False where the wire rounds.
    `sharded`: with `--use-distributed-optimizer`; `offloaded`: with `--optimizer-cpu-offload`, so
    that steps arrive bucket by bucket; `predivided`: with `--predivide-loss`, which is up to who
    makes the gradients; `wire`: `--grad-wire`; `local`: its ranks are replicas that take local
    steps, to which contracts 2 and 11 do not apply, and of which each skips a step on its own;
    `inner`: `--dp-inner-size` where it divides the ranks."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    lossless: bool = True
    linear: bool = True
    conserves: bool = True
    sharded: bool = False
    offloaded: bool = False
    predivided: bool = False
    wire: str | None = None
    local: bool = False
    inner: int = 1

    def __post_init__(self) -> None:
        gradient = GradientConfig(grad_wire=self.wire)  # type: ignore[arg-type]
        # What a wire rounds off is kept for the next step. Local steps send no gradients.
        if gradient.keeps_rounding and not self.local:
            object.__setattr__(self, "lossless", False)
        # Each rank rounds its own values, so other shares of a batch are rounded otherwise; Adam
        # makes whole updates of the differences of small gradients.
        if self.wire not in (None, "fp32"):
            object.__setattr__(self, "linear", False)

    @property
    def states(self) -> str:
        """Where the optimizer states are."""
        kinds = [f"inner={self.inner}"] if self.inner > 1 else ["sharded"] * self.sharded
        return "-".join([*kinds, *["offloaded"] * self.offloaded]) or "whole"

    @property
    def is_plain(self) -> bool:
        """Whether the case has no settings but the options of its path."""
        return (self.wire, self.states, self.predivided) == (None, "whole", False)

    @property
    def is_variant(self) -> bool:
        """Whether another case of the same path comes first."""
        return next((case for case in PATHS if case.name == self.name), self) != self


SHORT = {"radius_interval": 4, "radius_start_iter": 2}
"""Dense up to step 4, which is the first resample; steps 8 and 12 are the next resamples."""
FEW = {"radius_density": 0.06}
RANDOM = {"samo_sparsity": 0.5, "samo_pruning": "random"}
EARLY_BIRD = {"samo_pruning": "early-bird", "samo_sparsity": 0.5, "samo_early_bird_distance": 1.0}
"""Settings of an early-bird ticket that is the fifth draw."""
LOWRANK = {"lowrank_rank": 2, "lowrank_density": 0.02}
DEMO = {"demo_chunk": 16, "demo_k": 8, "demo_decay": 1.0, "demo_sign": False}
"""Settings under which DeMo keeps all that it does not send."""
DSR = {"dsr_interval": 2, "dsr_fraction": 0.1, "dsr_threshold": 0.1, "dsr_until": 95}
FRAGMENTS = {"local_steps": 9, "local_fragments": 3, "outer_lr": 1.0, "outer_momentum": 0.0}
"""The outer step is a mean of weights, as one dense step is of replicas with equal gradients."""
TOP_K = {
    "local_steps": 4,
    "outer_momentum": 0.0,
    "outer_compression": "topk",
    "outer_topk_chunk": 100,
    "outer_topk_k": 7,
}
PATHS = [
    PathCase("dense"),
    PathCase("dense", offloaded=True),
    PathCase("dense", sharded=True),
    PathCase("dense", wire="fp32"),
    PathCase("dense", wire="bf16"),
    PathCase("dense", wire="bf16", sharded=True),
    PathCase("dense", wire="int8"),
    PathCase("dense", wire="int4"),
    PathCase("dense", wire="int8", offloaded=True),
    PathCase("dense", wire="int8", sharded=True),
    PathCase("radius", SHORT, lossless=False),
    PathCase("radius", SHORT | {"radius_select": "seeded"}, lossless=False),
    PathCase("radius", SHORT | {"radius_schedule": "rolling"}, lossless=False),
    PathCase(
        "radius",
        SHORT | {"radius_schedule": "rolling", "radius_select": "seeded"},
        lossless=False,
    ),
    PathCase(
        "radius", SHORT | {"radius_schedule": "rolling", "radius_clip": "per-step"}, lossless=False
    ),
    # Entries that lie far apart, or that torch has to move, are kept as a list of offsets.
    PathCase("radius", SHORT | FEW, lossless=False),
    PathCase("radius", SHORT | FEW | {"radius_schedule": "rolling"}, lossless=False),
    PathCase("radius", SHORT, lossless=False, sharded=True),
    PathCase("radius", SHORT | FEW, lossless=False, sharded=True),
    PathCase(
        "radius",
        SHORT | {"radius_schedule": "rolling", "radius_select": "seeded"},
        lossless=False,
        sharded=True,
    ),
    PathCase("samo", RANDOM),
    PathCase("samo", RANDOM, wire="int8"),
    # Pruned by its tenth update.
    PathCase("samo", EARLY_BIRD | {"samo_early_bird_interval": 2}),
    PathCase("samo", RANDOM | DSR),
    PathCase("samo", RANDOM | DSR, sharded=True),
    PathCase("samo", RANDOM | DSR, offloaded=True),
    PathCase("samo+radius", RANDOM | SHORT, lossless=False),
    PathCase("samo+radius", RANDOM | SHORT, lossless=False, sharded=True),
    PathCase("radius", SHORT, lossless=False, wire="bf16"),
    PathCase("samo+radius", RANDOM | SHORT, lossless=False, wire="bf16"),
    # The residual keeps what the wire loses of sent entries.
    PathCase("radius", SHORT, lossless=False, wire="int8"),
    PathCase("radius", SHORT | FEW | {"radius_schedule": "rolling"}, lossless=False, wire="int4"),
    PathCase("radius", SHORT, lossless=False, wire="int8", sharded=True),
    PathCase("samo+radius", RANDOM | SHORT, lossless=False, wire="int8"),
    # Pruned after its fifth update, so that the eighth is the first resample.
    PathCase("samo+radius", EARLY_BIRD | {"samo_early_bird_interval": 1} | SHORT, lossless=False),
    # Each rank selects from its own share of the batch, so other shares select other entries.
    PathCase("topk", {"topk_density": 0.1}, lossless=False, linear=False),
    # The best factors of a sum are not the sum of the best factors.
    PathCase("powersgd", {"powersgd_rank": 2}, lossless=False, linear=False),
    PathCase("powersgd", {"powersgd_rank_share": 0.15}, lossless=False, linear=False),
    PathCase("lowrank+sparse", LOWRANK, lossless=False, linear=False),
    PathCase("roundrobin", {"roundrobin_interval": 3}, lossless=False),
    # Each rank selects coefficients of its own momentum.
    PathCase("demo", DEMO, lossless=False, linear=False),
    PathCase("demo", lossless=False, linear=False, conserves=False),
    PathCase("diloco", {"local_steps": 4}, linear=False, local=True),
    PathCase("diloco", FRAGMENTS, linear=False, local=True),
    PathCase("diloco", {"local_steps": 4}, local=True, wire="int8"),
    PathCase("diloco", TOP_K, linear=False, local=True),
    PathCase("diloco", FRAGMENTS | TOP_K | {"local_steps": 9}, linear=False, local=True),
    PathCase("dense", inner=2),
    PathCase("samo", RANDOM | DSR, inner=2),
    PathCase("radius", SHORT, lossless=False, inner=2),
    PathCase("radius", SHORT | FEW, lossless=False, inner=2),
    PathCase("radius", SHORT | {"radius_schedule": "rolling"}, lossless=False, inner=2),
    PathCase("samo+radius", RANDOM | SHORT, lossless=False, inner=2),
]
"""Paths with their options. The first line of a path and its options has no other settings:
`tests.contract.pairs` combines it with wires, places of the optimizer states and numbers of ranks.
Further lines of the same options are combinations that every push tests on two ranks, or on four
where two are too few. The first line of each path is tested on all of `WORLDS`, and is the one of
the fast tier."""
WORLDS = [1, 2, 4]


def case_id(case: PathCase) -> str:
    kinds = ["sharded"] * case.sharded + ["offloaded"] * case.offloaded
    kinds += [f"inner={case.inner}"] if case.inner > 1 else []
    kinds += [case.wire] if case.wire else []
    return "-".join([case.name, *kinds, *(f"{k}={v}" for k, v in case.options.items())])


class Toy:
    """The parameters, engine and optimizer of one rank; `step` runs one training step."""

    def __init__(
        self,
        groups: ProcessGroups,
        case: PathCase,
        *,
        dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        cap: int = 1024,
        overlap: bool = True,
        lr: float = 1e-2,
        weight_decay: float = 0.1,
        saved: SavedToy | None = None,
        scatter: bool | None = None,
        rule: UpdateRule | None = None,
        formats: StateFormats | None = None,
    ) -> None:
        if groups.dp.size > case.inner > 1:
            groups = grid(groups, inner=case.inner)
        self.groups, self.lr, self.weight_decay = groups, lr, weight_decay
        if case.offloaded and grad_dtype.itemsize < dtype.itemsize:
            dtype = grad_dtype  # Gradients are at least as wide as parameters.
        self.infos = [_info(name, shape, dtype) for name, shape in SHAPES.items()]
        parts = GRADIENT_PATHS[case.name].build(config_of(case), self.infos, groups, saved)
        if scatter is not None:
            config = config_of(case)
            reducer = ReduceScatterReducer(
                open_exchange(config, groups),
                scatter=scatter,
                feedback=entries_on_rank(self.infos) if config.gradient.keeps_rounding else None,
            )
            parts = replace(parts, reducer=reducer)
        self.engine = GradientEngine(
            self.infos,
            parts,
            groups,
            cap=cap,
            grad_dtype=grad_dtype,
            overlap=overlap,
            stream=case.offloaded,
            alignment=alignment_of(case, formats),
        )
        rule = rule or AdamW(beta1=0.9, beta2=0.99, eps=1e-8)
        if case.offloaded:
            self.optimizer = OffloadedOptimizer(
                self.engine, rule, bucket_size=OFFLOAD_BUCKET, formats=formats
            )
        else:
            self.optimizer = BucketOptimizer(self.engine, rule, formats=formats)
        self.steps = 0

    def backward(self, wanted: list[dict[str, torch.Tensor]], loss_scale: float = 1.0) -> None:
        """Run one backward for each set of wanted gradients, as for microbatches."""
        self.engine.begin(StepContext(t=self.optimizer.applied + 1, loss_scale=loss_scale))
        for number, gradients in enumerate(wanted):
            if number == len(wanted) - 1:
                self.engine.expect_last_backward()
            leaves = [(leaf, info) for info in self.infos for leaf in info.leaves]
            shares = [gradients[info.name].view(-1) / len(info.leaves) for _, info in leaves]
            # One product of all leaves takes fewer operations than one for each.
            values = torch.cat([leaf.view(-1).double() for leaf, _ in leaves])
            (values.dot(torch.cat(shares).double()) * loss_scale).backward()

    def finish(self, *, clip_norm: float = 0.0, tag: int | None = None) -> Step:
        self.steps += 1
        return self.engine.finish(tag=self.steps if tag is None else tag, clip_norm=clip_norm)

    def apply(self, step: Step) -> None:
        if step.ok:
            self.optimizer.step(step, lr=self.lr, weight_decay=self.weight_decay)
            self.engine.commit(step)
            self.optimizer.update_masks()
        else:
            self.engine.abort()
        self.optimizer.end_step(self.steps)

    def step(
        self,
        wanted: list[dict[str, torch.Tensor]],
        *,
        clip_norm: float = 0.0,
        loss_scale: float = 1.0,
    ) -> Step:
        self.backward(wanted, loss_scale)
        step = self.finish(clip_norm=clip_norm)
        self.apply(step)
        return step

    def reduced(self, step: Step) -> dict[str, torch.Tensor]:
        """Return the mean gradient by name, unscaled, with zeros where nothing was sent.

        Shards of a mean are gathered, collectively over their ranks.
        """
        found = {}
        for info, bucket, where in self.engine.slices():
            reduced = step.reduced[bucket.index]
            dense = reduced.values
            if reduced.index is not None:
                # A shard includes padding.
                length = bucket.numel if reduced.part is None else reduced.part.numel
                positions = torch.empty(reduced.index.numel, dtype=torch.int64)
                reduced.index.gather(torch.arange(length), positions)
                dense = torch.zeros(length, dtype=dense.dtype)
                dense.index_copy_(0, positions, reduced.values)
            if reduced.part is not None and bucket.shard is not None:
                whole = torch.zeros(bucket.shard.length)
                reduced.part.of(whole)[: dense.numel()] = dense
                bucket.shard.exchange.fill(whole)
                dense = whole
            found[info.name] = self.whole(info.name, where.of(dense).float())
        return found

    def whole(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Return the flattened parameter that has these stored entries, and 0 elsewhere."""
        found = torch.zeros(math.prod(SHAPES[name]))
        self.engine.layout.scatter(name, stored, found)
        return found

    def exists(self, name: str) -> torch.Tensor:
        """Return which entries of the flattened parameter are stored."""
        mask = self.engine.layout.mask(name)
        return torch.ones(math.prod(SHAPES[name]), dtype=torch.bool) if mask is None else mask

    def entry(self, name: str) -> int:
        """Return the second stored position of the flattened parameter."""
        return int(self.exists(name).nonzero()[1])

    def residual(self) -> dict[str, torch.Tensor]:
        """Return this rank's residual by name, flattened; zeros for a path that keeps none.

        With an index, the residual consists of the entries outside the index.
        """
        found = {name: torch.zeros(math.prod(SHAPES[name])) for name in SHAPES}
        for name, kept in self.own().items():
            found[name] = self.whole(name, kept)
        return found

    def own(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's reducer state, as a checkpoint restores it."""
        return self._copies(self.engine.reducer.state_tensors())

    def shared(self) -> dict[str, torch.Tensor]:
        """Return copies of the state shared by data-parallel ranks, as a checkpoint restores it."""
        return self._copies(self.engine.shared_tensors())

    def _copies(
        self, states: Iterable[tuple[str, torch.Tensor | PerEntryState]]
    ) -> dict[str, torch.Tensor]:
        states = list(states)
        found = copies(states)
        for name, state in states:
            if isinstance(state, PerEntryState) and state.sharded:
                bucket, where = self.engine.place(state.param)
                assert bucket.shard is not None
                entries = min(where.numel, self.engine.infos[state.param].local_entries)
                whole = torch.zeros(entries)
                bucket.kept_of(state.param).of(whole).copy_(found[name])
                bucket.shard.exchange.fill(whole)
                found[name] = whole.to(found[name].dtype)
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything that a skipped step must not change, with whole optimizer states."""
        found = {info.name: info.param.detach().clone() for info in self.infos}
        for kind, name, tensor in self.optimizer.whole_tensors():
            found[f"{kind}/{name}"] = tensor.clone()
        found |= {f"reducer/{name}": tensor for name, tensor in self.own().items()}
        found |= {f"shared/{name}": tensor for name, tensor in self.shared().items()}
        if (local := self.engine.local_steps) is not None:
            for anchor in local.anchors:
                found[f"anchor/{anchor.bucket.index}"] = anchor.weights.clone()
        for name in SHAPES:
            found[f"mask/{name}"] = self.exists(name).clone()
        return found


def alignment_of(case: PathCase, formats: StateFormats | None) -> int:
    """Return the alignment of slices and shards as a run of this case has it."""
    has_blocks = formats is not None and formats.has_blocks
    return STATE_BLOCK if has_blocks else slice_alignment(config_of(case))


def copies(states: Iterable[tuple[str, torch.Tensor | PerEntryState]]) -> dict[str, torch.Tensor]:
    """Return copies of a path's state by name, as a checkpoint restores it."""
    return {
        name: (state.values() if isinstance(state, PerEntryState) else state).clone()
        for name, state in states
    }


class SavedToy:
    """The masks of a toy as a gradient path reads them from a checkpoint."""

    same_path = True

    def __init__(self, toy: Toy) -> None:
        masks = {name: toy.engine.layout.mask(name) for name in SHAPES}
        self._masks = {
            f"mask/{name}": mask.clone().view(SHAPES[name])
            for name, mask in masks.items()
            if mask is not None
        }

    def names(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(name for name in self._masks if name.startswith(prefix))

    def read(
        self, name: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> torch.Tensor:
        box = zip(start or (), stop or (), strict=True)
        return self._masks[name][tuple(slice(low, high) for low, high in box)]


def gradients(*seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return random fp32 gradients for every parameter as a function of the seed numbers."""
    return gradients_of(SHAPES, *seed, scale=scale)


def gradients_of(
    shapes: Mapping[str, tuple[int, ...]], *seed: int, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return gradients for parameters of these shapes."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors differ in any bit."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def config_of(case: PathCase) -> Any:
    """Return the configuration that a gradient path reads, with the options of the case."""
    path = GRADIENT_PATHS[case.name]
    extensions = {
        section: cls(
            **{f.name: case.options[f.name] for f in fields(cls) if f.name in case.options}
        )
        for section, cls in path.sections.items()
    }
    return SimpleNamespace(
        extensions=extensions,
        gradient=GradientConfig(grad_path=case.name, grad_wire=case.wire),  # type: ignore[arg-type]
        parallel=ParallelConfig(use_distributed_optimizer=case.sharded),
        training=SimpleNamespace(seed=1, skip_train=False),
        precision=SimpleNamespace(
            param_dtype="float32", grad_dtype="float32", predivide_loss=case.predivided
        ),
        offload=OffloadConfig(
            optimizer_cpu_offload=case.offloaded,
            offload_bucket_size=OFFLOAD_BUCKET,
            offload_coarsening=64,
        ),
        optimizer=OptimizerConfig(),
        total_iterations=lambda: TOTAL_ITERATIONS,
    )


def _info(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ParamInfo:
    generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
    leaf = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    leaves = (leaf,)
    if name == TIED:
        leaves = (leaf, torch.nn.Parameter(leaf.detach()))
    return ParamInfo(
        name=name,
        leaves=leaves,
        logical_shape=shape,
        tied=name == TIED,
        weight_decay=len(shape) > 1,
    )
