"""The nearest settings that fit if a configuration does not, and the fewest stages that do."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config import GPTConfig, check, resolve
from megatron.config.gpt import SPECS
from megatron.config.validate import check_pairs
from megatron.data_parallel.gradient_path import GradientPath
from megatron.errors import ConfigError
from tools.planner.plan import Plan

Changes = Mapping[str, Any]
"""Values by the name of the field."""
Planner = Callable[[GPTConfig], Plan]
"""A function that returns the plan of a checked configuration, on the same ranks."""
MOST = 8
_OF_A_PIPELINE: Changes = {
    "pipeline_schedule": "1f1b",
    "pipeline_limit": None,
    "num_layers_per_virtual_pipeline_stage": None,
}
"""Settings that a single stage cannot have."""


@dataclass(frozen=True)
class Way:
    """Settings to change, and the plan with them."""

    changes: Changes
    plan: Plan

    @property
    def flags(self) -> str:
        """The flags to append to the command."""
        return " ".join(_flag(name, value) for name, value in self.changes.items())


@dataclass(frozen=True)
class Search:
    """A search for plans that fit, near one that does not.

    `paths` has the gradient paths by name; `planner` plans a configuration on the same ranks.
    """

    plan: Plan
    paths: Mapping[str, GradientPath]
    planner: Planner

    def nearest(self) -> list[Way]:
        """Return up to `MOST` plans that fit with the fewest changes: one, else two, else three.

        Two changes are full recomputation and another one; three also have a micro-batch of 1.
        """
        singles = list(self._singles())
        found = self._fitting({**change} for change in singles)
        deeper = {"recompute_granularity": "full"}
        batch = {"micro_batch_size": 1}
        for base in (deeper, deeper | batch):
            if found:
                break
            if self._is_set(base):
                continue
            found = self._fitting({**base, **change} for change in singles)
        return found[:MOST]

    def fewest(self) -> dict[str, Way | None]:
        """Return the smallest pipeline that fits, without and with a change that saves memory.

        Keys describe the change; a value is None if no pipeline on these ranks fits.
        """
        path = self.plan.grid.config.gradient.grad_path
        found = {f"{path} as it is": self.fewest_stages()}
        if "samo" in path:
            found["dense"] = self.fewest_stages({"grad_path": "dense"})
        elif path == "dense":
            found["samo at p = 0.9"] = self.fewest_stages({"grad_path": "samo"})
        if not self.plan.grid.config.offload.optimizer_cpu_offload:
            offloaded = {"optimizer_cpu_offload": True, "use_distributed_optimizer": False}
            found["offloaded states"] = self.fewest_stages(offloaded)
        return found

    def fewest_stages(self, changes: Changes | None = None) -> Way | None:
        """Return the smallest pipeline on the same ranks, G_inter, that fits with these changes.

        None if there is none.
        """
        dims = self.plan.grid.dims
        for stages in range(1, dims.world_size // dims.tp + 1):
            if dims.world_size % (dims.tp * stages):
                continue
            alone = _OF_A_PIPELINE if stages == 1 else {}
            way = self._try({**(changes or {}), **alone, "pipeline_model_parallel_size": stages})
            if way is not None and way.plan.fits:
                return way
        return None

    def _singles(self) -> Iterator[Changes]:
        """Yield single changes from the cheapest to the costliest, in time and in learning."""
        config, dims = self.plan.grid.config, self.plan.grid.dims
        path, size = config.gradient.grad_path, config.training.micro_batch_size
        if config.recompute.recompute_granularity is None:
            yield {"recompute_granularity": "selective"}
        if config.recompute.recompute_granularity != "full":
            full = {"recompute_granularity": "full"}
            yield full
        while size > 1:
            size //= 2
            yield {"micro_batch_size": size}
        if dims.dp > 1 and {"dense", "samo", "radius"}.issuperset(path.split("+")):
            yield {"use_distributed_optimizer": True}
        if path in ("dense", "samo"):
            yield {"optimizer_cpu_offload": True}
        if dims.tp > 1 and not config.parallel.sequence_parallel:
            yield {"sequence_parallel": True}
        for factor in _factors(dims.world_size // dims.tp):
            if factor > dims.pp:
                yield {"pipeline_model_parallel_size": factor}
        for factor in _factors(min(self.plan.site.gpus_per_node, dims.world_size)):
            if factor > dims.tp:
                yield {"tensor_model_parallel_size": factor}
        if path == "dense":
            yield {"grad_path": "samo"}

    def _fitting(self, many: Iterator[dict[str, Any]]) -> list[Way]:
        """Return the first way that fits for each set of fields."""
        found: dict[tuple[str, ...], Way] = {}
        for changes in many:
            if tuple(changes) in found:
                continue
            way = self._try(changes)
            if way is not None and way.plan.fits:
                found[tuple(changes)] = way
        return list(found.values())

    def _is_set(self, changes: Changes) -> bool:
        values = self.plan.grid.config.values()
        return all(values[name] == value for name, value in changes.items())

    def _try(self, changes: Changes) -> Way | None:
        """Return a plan, or None if the configuration is refused."""
        try:
            config = changed(self.plan.grid.config, changes, self.paths)
            return Way(changes, self.planner(resolve(config, self.plan.grid.dims.world_size)))
        except ConfigError:
            return None


def changed(config: GPTConfig, changes: Changes, paths: Mapping[str, GradientPath]) -> GPTConfig:
    """Return the configuration with other values of some fields, checked like a parsed one.

    Raises `ConfigError` if the values are refused.
    """
    config = config.with_values(changes)
    if changes.get("recompute_granularity") == "selective":
        config = config.with_values({"recompute_method": None, "recompute_num_layers": None})
    path = paths[config.gradient.grad_path]
    if "grad_path" in changes:
        extensions = {name: cls() for name, cls in path.sections.items()}
        config = dataclasses.replace(config, extensions=extensions)
    check(config, {})
    check_pairs(config, path.refused_pairs)
    path.check(config)
    return config


def _flag(name: str, value: object) -> str:
    flag = SPECS[name].flag
    return flag if value is True else f"{flag} {shlex.quote(str(value))}"


def _factors(count: int) -> list[int]:
    return [factor for factor in range(2, count + 1) if count % factor == 0]
