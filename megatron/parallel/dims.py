"""Rank arithmetic of the tensor x data x pipeline grid. No torch, so tools can plan with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.errors import ConfigError

Axis = Literal["tp", "dp", "pp"]


class Coordinates(NamedTuple):
    """Place of a rank on each axis of the grid."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degrees of tensor, data and pipeline parallelism; tp varies fastest, then dp, then pp.

    Neighbours in rank order share a node, so the axis that talks most comes first.
    """

    tp: int
    dp: int
    pp: int

    def __post_init__(self) -> None:
        if min(self.tp, self.dp, self.pp) < 1:
            raise ConfigError(f"parallel sizes must be at least 1: {self}")

    @classmethod
    def from_world(cls, world_size: int, *, tp: int, pp: int) -> ParallelDims:
        """The grid that fills `world_size` ranks; `ConfigError` names the nearest that would."""
        model_ranks = tp * pp
        if world_size % model_ranks:
            below = world_size // model_ranks * model_ranks
            nearest = [str(n) for n in (below, below + model_ranks) if n]
            raise ConfigError(
                f"world size {world_size} is not a multiple of {model_ranks} "
                f"(tensor-model-parallel-size {tp} x pipeline-model-parallel-size {pp}); "
                f"start {' or '.join(nearest)} ranks"
            )
        return cls(tp=tp, dp=world_size // model_ranks, pp=pp)

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return self.tp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Where a global rank stands."""
        return Coordinates(
            tp=rank % self.tp,
            dp=rank // self.tp % self.dp,
            pp=rank // (self.tp * self.dp),
        )

    def rank(self, at: Coordinates) -> int:
        """The global rank that stands there."""
        return at.tp + self.tp * (at.dp + self.dp * at.pp)

    def lines(self, axis: Axis) -> list[tuple[int, ...]]:
        """All groups along an axis: the sets of global ranks that differ in this axis alone,
        each ascending, in an order every rank computes alike."""
        groups: dict[Coordinates, list[int]] = {}
        for rank in range(self.world_size):
            line = self.coordinates(rank)._replace(**{axis: 0})
            groups.setdefault(line, []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def __str__(self) -> str:
        return f"TP {self.tp} x DP {self.dp} x PP {self.pp} = {self.world_size} ranks"
