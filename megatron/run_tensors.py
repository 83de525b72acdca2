"""The tensors of a run and their names in a checkpoint: who writes which, who reads what.

Names are of logical tensors, so that a checkpoint of one grid can be loaded by any other. A rank
writes its boxes of a tensor; what several ranks hold alike one of them writes, and data-parallel
ranks share that work out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from megatron.checkpoint.logical import FileMask, Held
from megatron.checkpoint.store import Checkpoint, Shard, of_rank, owner, whole
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.reducer import Entries
from megatron.errors import CheckpointError
from megatron.optimizer.bucket_optimizer import PARAM, BucketOptimizer
from megatron.optimizer.shards import fill, pieces
from megatron.parallel.groups import ProcessGroups

PATH, ENTRIES, RESIDUAL, MASK = "path/", "entries/", "residual/", "mask/"
"""Where checkpoints keep a gradient path's state: plain tensors, and such as go by the entries of a
parameter, which all data-parallel ranks share; what each of these has of its own; and which entries
of parameters exist."""
_OLD_INDEX = f"{PATH}index/"
"""Where the first version of the format kept what Radius had chosen."""


@dataclass(frozen=True)
class _Part:
    """A tensor to save: the data-parallel rank it falls to makes the shards."""

    name: str
    nbytes: int
    make: Callable[[], Iterator[Shard]]


@dataclass(frozen=True, kw_only=True)
class RunTensors:
    """Weights, moments and the gradient path's state of a run, as they are in a checkpoint."""

    groups: ProcessGroups
    engine: GradientEngine
    optimizer: BucketOptimizer

    # ---- writing -------------------------------------------------------------------------------

    def shards(self, *, moments: bool) -> Iterator[Shard]:
        """What this rank writes. Collective over the ranks of a copy of the model."""
        dp, pruned = self.groups.dp, self._pruned()
        parts = {part.name: part for part in self._shared(pruned, moments)}
        owners = owner({name: part.nbytes for name, part in parts.items()}, dp.size)
        for name, part in parts.items():
            if owners[name] == dp.rank:
                yield from part.make()
        if self.optimizer.is_sharded:
            yield from self._kept(pruned, moments)
        shared = dict(self.engine.shared_tensors())
        for name, state in self.engine.reducer.state_tensors():
            if self.engine.model_shard.owns(self.engine.infos[name]):
                for shard in self._own_shards(state, shared, pruned):
                    yield of_rank(shard, data_parallel_rank=dp.rank, data_parallel_size=dp.size)

    def _shared(self, pruned: set[str], moments: bool) -> Iterator[_Part]:
        """State equal on all data-parallel ranks, as far as this rank's group writes it. Of a
        parameter that is stored in part its mask is saved once, and of its weight and moments the
        entries there are."""
        for kind, name, flat in self.optimizer.tensors():
            info = self.engine.infos[name]
            held = self._held(info, pruned)
            if not self.engine.model_shard.owns(info):
                continue
            if kind == PARAM and held.pruned:
                make = partial(_mask_shards, held)
                yield _Part(f"{MASK}{name}", info.local_entries, make)
            if (kind == PARAM or moments) and not self.optimizer.is_sharded:
                file = f"{kind}/{name}"
                yield _Part(file, flat.nbytes, partial(_shards, held, file, held.stored(flat)))
        plain: dict[str, torch.Tensor] = {}
        for name, state in self.engine.shared_tensors():
            if not isinstance(state, Entries):
                plain[f"{PATH}{name}"] = state
            elif self.engine.model_shard.owns(info := self.engine.infos[state.param]):
                make = partial(_entry_shards, self._held(info, pruned), name, state)
                yield _Part(f"{ENTRIES}{name}", info.local_entries, make)
        first = self._first_with(list(plain))
        for name, tensor in plain.items():
            if name in first:
                yield _Part(name, tensor.nbytes, partial(_whole, name, tensor))

    def _kept(self, pruned: set[str], moments: bool) -> Iterator[Shard]:
        """Weights and moments of which each data-parallel rank keeps, and writes, a part."""
        for kind, name, flat in self.optimizer.tensors():
            info, file = self.engine.infos[name], f"{kind}/{name}"
            if not self.engine.model_shard.owns(info) or not (kind == PARAM or moments):
                continue
            if not self.engine.layout.numel(name, info.param) and self.groups.dp.rank == 0:
                # Nothing is stored here, which somebody has to say.
                yield from _shards(self._held(info, pruned), file, flat)
            mask = f"{MASK}{name}" if name in pruned else None
            for part in pieces(self.engine, name, flat):
                shape = tuple(info.logical_shape)
                yield Shard(file, part.values, shape, part.start, part.stop, part.flat, mask)

    def _own_shards(
        self,
        state: Entries,
        shared: Mapping[str, torch.Tensor | Entries],
        pruned: set[str],
    ) -> Iterator[Shard]:
        held = self._held(self.engine.infos[state.param], pruned)
        file = f"{RESIDUAL}{state.param}"
        if not state.unless:
            return _shards(held, file, state.values())
        excluding = shared[state.unless]
        assert isinstance(excluding, Entries)
        left_out = excluding.values()
        values = state.values()
        mask = FileMask(f"{ENTRIES}{state.unless}", False, ~held.spread(left_out, True))
        return held.shards(file, values[~left_out.to(values.device)], mask)

    def _held(self, info: ParamInfo, pruned: set[str]) -> Held:
        return Held(info, self.engine.layout, info.name in pruned)

    def _pruned(self) -> set[str]:
        """Parameters of which a rank that has a part of them does not store all."""
        infos = self.engine.infos.values()
        mine = [
            info.name
            for info in infos
            if self.engine.layout.numel(info.name, info.param) < info.param.numel()
        ]
        texts = self.groups.tp.gather_text(json.dumps(mine))
        return {name for text in texts for name in json.loads(text)}

    def _first_with(self, names: list[str]) -> set[str]:
        """Those of the names that no rank of this copy of the model before this one has."""
        own, found = set(names), set(names)
        for group in (self.groups.tp, self.groups.pp):
            by_rank = [set(json.loads(text)) for text in group.gather_text(json.dumps(sorted(own)))]
            found = found.difference(*by_rank[: group.rank])
            own = own.union(*by_rank)
        return found

    # ---- reading -------------------------------------------------------------------------------

    def take(self, saved: Checkpoint, *, moments: bool) -> None:
        """Read weights, and moments unless they are to start from nothing."""
        stored = set(saved.names())
        for kind, name, flat in self.optimizer.tensors():
            if kind != PARAM and not moments:
                continue
            if f"{kind}/{name}" not in stored:
                raise CheckpointError(
                    f"{saved.path}: has no {kind}/{name}: it was saved without optimizer state or "
                    "by another optimizer; give --load and --no-load-optim to start that from "
                    "nothing"
                )
            held = Held(self.engine.infos[name], self.engine.layout, pruned=False)
            fill(self.engine, name, flat, held.read(saved, f"{kind}/{name}"))

    def take_path(self, saved: Checkpoint) -> None:
        """Give the gradient path its state back. Collective."""
        self.groups.world.agreed(lambda: self._take_path(saved))

    def _take_path(self, saved: Checkpoint) -> None:
        if saved.names(_OLD_INDEX):
            raise CheckpointError(
                f"{saved.path}: an earlier version of this program saved what Radius had chosen in "
                "another form; give --load, --reset-grad-state and a new --run-dir to leave that "
                "behind"
            )
        shared = {name.removeprefix(PATH): partial(saved.read, name) for name in saved.names(PATH)}
        own: dict[str, Callable[[], torch.Tensor]] = {}
        dp = self.groups.dp
        for name in saved.names(ENTRIES):
            if (held := self._part_of(name)) is not None:
                shared[name.removeprefix(ENTRIES)] = partial(_read, held, saved, name)
        for name in saved.names(RESIDUAL):
            if (held := self._part_of(name)) is not None:
                own[held.info.name] = partial(_read_own, held, saved, name, dp.rank, dp.size)
        self.engine.load_state_tensors(_Reading(own), _Reading(shared))

    def _part_of(self, name: str) -> Held | None:
        """This rank's part of the parameter that a name ends in, None where it has none."""
        info = self.engine.infos.get(name.rpartition("/")[2])
        if info is None:
            return None
        return Held(info, self.engine.layout, self.engine.layout.mask(info.name) is not None)


class _Reading(Mapping[str, torch.Tensor]):
    """Tensors of a checkpoint, read when they are asked for, so that they are not here together."""

    def __init__(self, readers: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def _shards(held: Held, file: str, values: torch.Tensor) -> Iterator[Shard]:
    """Of stored entries: the mask of those that exist tells which they are."""
    name = held.info.name
    mask = FileMask(f"{MASK}{name}", True, held.exists) if held.pruned else None
    return held.shards(file, values, mask)


def _mask_shards(held: Held) -> Iterator[Shard]:
    return held.shards(f"{MASK}{held.info.name}", held.exists)


def _entry_shards(held: Held, name: str, state: Entries) -> Iterator[Shard]:
    """A mask is saved whole, True where nothing exists that it could tell of."""
    values, file = state.values(), f"{ENTRIES}{name}"
    if values.dtype != torch.bool:
        return _shards(held, file, values)
    return held.shards(file, held.spread(values, True))


def _whole(name: str, tensor: torch.Tensor) -> Iterator[Shard]:
    yield whole(name, tensor)


def _read(held: Held, saved: Checkpoint, name: str) -> torch.Tensor:
    return held.pick(held.read(saved, name))


def _read_own(held: Held, saved: Checkpoint, name: str, rank: int, ranks: int) -> torch.Tensor:
    return held.pick(held.read_own(saved, name, rank, ranks))
