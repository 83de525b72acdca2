"""Rank arithmetic of the tensor x data x pipeline grid. Imports no torch, for the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.errors import ConfigError

Axis = Literal["tp", "dp", "pp"]
Order = Literal["tp-dp-pp", "tp-pp-dp"]
"""Axes of the grid from fastest to slowest varying in rank."""


class Coordinates(NamedTuple):
    """Coordinates of a rank in the grid."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degrees of tensor, data and pipeline parallelism, and the order of ranks in the grid.

    Consecutive ranks share a node, so tp, the axis with most traffic, always varies fastest. With
    `order` "tp-dp-pp" data-parallel groups are closer together than pipelines, with "tp-pp-dp" the
    reverse. The order changes the placement of ranks only, not their results. `dp_inner` is the
    number of data-parallel ranks in a row, as those of a node, that shard optimizer states and
    reduce gradients among them first; 1 if there are no such groups.

    Raises:
        ConfigError: A degree is below 1.
    """

    tp: int
    dp: int
    pp: int
    order: Order = "tp-dp-pp"
    dp_inner: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.dp, self.pp) < 1:
            raise ConfigError(f"parallel sizes must be at least 1: {self}")
        assert self.dp % self.dp_inner == 0, "the configuration was checked"

    @classmethod
    def from_world(
        cls,
        world_size: int,
        *,
        tp: int,
        pp: int,
        order: Order = "tp-dp-pp",
        dp_inner: int = 1,
    ) -> ParallelDims:
        """Return the grid that fills `world_size` ranks.

        Raises:
            ConfigError: No such grid exists; the text names the nearest world sizes.
        """
        model_ranks = tp * pp
        if world_size % model_ranks:
            below = world_size // model_ranks * model_ranks
            nearest = [str(n) for n in (below, below + model_ranks) if n]
            raise ConfigError(
                f"world size {world_size} is not a multiple of {model_ranks} "
                f"(tensor-model-parallel-size {tp} x pipeline-model-parallel-size {pp}); "
                f"start {' or '.join(nearest)} ranks"
            )
        dp = world_size // model_ranks
        return cls(tp=tp, dp=dp, pp=pp, order=order, dp_inner=dp_inner)

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return self.tp * self.dp * self.pp

    @property
    def sizes(self) -> dict[str, int]:
        """Degree of each axis, without the order of the ranks."""
        return {"tp": self.tp, "dp": self.dp, "pp": self.pp}

    def stride(self, axis: Axis) -> int:
        """Return the distance in rank between neighbours along an axis."""
        distances: dict[Axis, int] = {
            "tp": 1,
            "dp": self.tp * (self.pp if self.order == "tp-pp-dp" else 1),
            "pp": self.tp * (self.dp if self.order == "tp-dp-pp" else 1),
        }
        return distances[axis]

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank, each counted from 0."""
        return Coordinates(
            tp=rank // self.stride("tp") % self.tp,
            dp=rank // self.stride("dp") % self.dp,
            pp=rank // self.stride("pp") % self.pp,
        )

    def rank(self, at: Coordinates) -> int:
        """Return the global rank at these coordinates."""
        return at.tp * self.stride("tp") + at.dp * self.stride("dp") + at.pp * self.stride("pp")

    def lines(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return all groups along an axis: global ranks that differ in this coordinate only.

        Each group is ascending; the order of groups is equal on every rank.
        """
        groups: dict[Coordinates, list[int]] = {}
        for rank in range(self.world_size):
            line = self.coordinates(rank)._replace(**{axis: 0})
            groups.setdefault(line, []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def inner_lines(self) -> list[tuple[int, ...]]:
        """Return the groups of `dp_inner` consecutive ranks of all data-parallel groups."""
        size = self.dp_inner
        return [line[at : at + size] for line in self.lines("dp") for at in range(0, self.dp, size)]

    def outer_lines(self) -> list[tuple[int, ...]]:
        """Return the groups of the ranks with one place in their inner groups."""
        return [
            line[at :: self.dp_inner] for line in self.lines("dp") for at in range(self.dp_inner)
        ]

    def __str__(self) -> str:
        order = "" if self.order == "tp-dp-pp" else f" ({self.order})"
        return f"TP {self.tp} x DP {self.dp} x PP {self.pp} = {self.world_size} ranks{order}"
