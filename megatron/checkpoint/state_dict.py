"""The tensors of a run by their names in a checkpoint, and the rank that writes each part.

    logical tensor --boxes--> part on this rank --mask--> stored entries --mask--> entries in a file

Names are of logical tensors, so that any grid loads the checkpoint of any other. A tensor-parallel
rank has boxes of a tensor, a pruned tensor is stored in part, and some stored entries may be left
out of the file. If several ranks hold the same part, one of them writes it; data-parallel ranks
share that work.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from megatron.checkpoint.format import Box, volume, within
from megatron.checkpoint.state_scales import (
    compensation_name,
    decoded,
    has_same_blocks,
    read_scales,
    scale_name,
    scale_shards,
)
from megatron.checkpoint.store import Checkpoint, Chosen, LocalShard, of_rank, owner, whole
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.buffers import NO_BUFFERS, BufferSet
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.reducer import PerEntryState
from megatron.errors import CheckpointError
from megatron.optimizer.bucket_optimizer import PARAM, BucketOptimizer
from megatron.optimizer.distributed_optimizer import encode, fill, pieces
from megatron.optimizer.state_formats import StateVector
from megatron.parallel.groups import ProcessGroups


@dataclass(frozen=True)
class FileMask:
    """A mask that selects the entries in a file.

    The file holds the entries at which the boolean tensor `name` of the checkpoint equals `value`;
    on this rank these are the entries marked by `kept`, bool [local_entries].
    """

    name: str
    value: bool
    kept: torch.Tensor


@dataclass(frozen=True)
class LocalParameter:
    """The part of a parameter on this rank, described by `info`.

    `layout` stores some or all entries of the part. `pruned`: some entries are not stored, on this
    rank or on another rank with a part.
    """

    info: ParamInfo
    layout: BucketLayout
    pruned: bool

    @property
    def exists(self) -> torch.Tensor:
        """Mask of the part's stored entries: bool [local_entries], on the CPU.

        It is computed at each access: keeping it would take a byte per entry of a pruned model.
        """
        entries, mask = self.info.local_entries, self.layout.mask(self.info.name)
        return torch.ones(entries, dtype=torch.bool) if mask is None else mask[:entries]

    @property
    def boxes(self) -> list[tuple[Box, Box]]:
        """Boxes of the logical tensor, with their positions in the part."""
        if self.info.tp_shard is not None:
            return list(self.info.tp_shard.boxes())
        box = (0,) * len(self.info.logical_shape), tuple(self.info.logical_shape)
        return [(box, box)]

    def stored(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of the stored entries of a state in a bucket, without vocabulary padding.

        Padding lies at the end of a slice that is stored whole, and is absent from other slices.
        """
        return flat[: self.info.local_entries]

    def pick(self, part: torch.Tensor) -> torch.Tensor:
        """Select the stored entries from all entries of the part, 1-D on the CPU."""
        return part[self.exists] if self.pruned else part

    def spread(self, stored: torch.Tensor, fill: bool) -> torch.Tensor:
        """Expand the stored entries (bool) to all entries of the part; the others become `fill`."""
        if not self.pruned:
            return stored.cpu()
        return torch.full_like(self.exists, fill).masked_scatter_(self.exists, stored.cpu())

    # ---- writing -------------------------------------------------------------------------------

    def shards(
        self, name: str, values: torch.Tensor, mask: FileMask | None = None
    ) -> Iterator[LocalShard]:
        """Yield the shards of the tensor `name` that this rank writes.

        `values` (1-D) are the part's entries that go to the file; all entries if there is no mask.
        """
        boxes, shape = self.boxes, tuple(self.info.logical_shape)
        whole = values
        if len(boxes) > 1 and mask is not None:
            kept = mask.kept.to(values.device)
            whole = values.new_zeros(self.info.local_entries).masked_scatter_(kept, values)
        for (start, stop), box in boxes:
            part = whole if len(boxes) == 1 else self._box(whole, box)
            if mask is None:
                yield LocalShard(name, part, shape, start, stop)
                continue
            if len(boxes) > 1:
                part = part[self._box(mask.kept, box).to(part.device)]
            yield LocalShard(name, part, shape, start, stop, mask=mask.name, mask_value=mask.value)

    def _box(self, part: torch.Tensor, box: Box) -> torch.Tensor:
        shape = self.info.local_shape
        return part.view(shape)[within(box, (0,) * len(shape))].reshape(-1)

    # ---- reading -------------------------------------------------------------------------------

    def read(self, saved: Checkpoint, name: str) -> torch.Tensor:
        """Read all entries of the part (1-D, on the CPU); entries not in the file are 0."""
        return self._read(saved, name, ())

    def read_own(self, saved: Checkpoint, name: str, rank: int, ranks: int) -> torch.Tensor:
        """Read state that differs between data-parallel ranks.

        If the number of ranks was not `ranks`, every rank gets the mean of the old ranks' states,
        which keeps the pending update.
        """
        before = saved.shape(name)[0]
        if before == ranks:
            return self._read(saved, name, (rank,))
        total = self._read(saved, name, (0,))
        for old in range(1, before):
            total += self._read(saved, name, (old,))
        return total.div_(before)

    def _read(self, saved: Checkpoint, name: str, lead: tuple[int, ...]) -> torch.Tensor:
        after = tuple(axis + 1 for axis in lead)
        pieces = []
        for (start, stop), box in self.boxes:
            found = saved.read(name, (*lead, *start), (*after, *stop))
            pieces.append((found.view([b - a for a, b in zip(start, stop, strict=True)]), box))
        if len(pieces) == 1:
            return pieces[0][0].view(-1)
        part = pieces[0][0].new_empty(self.info.local_shape)
        for found, box in pieces:
            assert found.numel() == volume(box)
            part[within(box, (0,) * part.dim())] = found
        return part.view(-1)


PATH, ENTRIES, RESIDUAL, MASK = "path/", "entries/", "residual/", "mask/"
"""Prefixes of a gradient path's tensors in a checkpoint.

`PATH`: plain tensors. `ENTRIES`: one value per entry of a parameter, equal on all data-parallel
ranks. `RESIDUAL`: one value per entry on each data-parallel rank. `MASK`: the stored entries of a
parameter.
"""
REPLICA = "replica/"
"""Prefix of states that each replica of a run with local steps has alone: moments and, inside a
round, weights. The weights without the prefix are then the anchor, which all replicas share."""
BUFFER = "buffer/"
"""Prefix of the model's buffers in a checkpoint; each buffer is saved whole."""
_OLD_INDEX = f"{PATH}index/"
"""Folder in which the first version of the format kept Radius's selection."""


@dataclass(frozen=True)
class _RankPart:
    """A tensor to save; `make` yields its shards on the data-parallel rank that owns it."""

    name: str
    nbytes: int
    make: Callable[[], Iterator[LocalShard]]


@dataclass(frozen=True, kw_only=True)
class RunStateDict:
    """Weights, moments, buffers and the path's state of a run, as they are in a checkpoint."""

    groups: ProcessGroups
    engine: GradientEngine
    optimizer: BucketOptimizer
    buffers: BufferSet = NO_BUFFERS

    # ---- writing -------------------------------------------------------------------------------

    def shards(self, *, moments: bool) -> Iterator[LocalShard]:
        """Yield the shards that this rank writes.

        Collective over the ranks of a copy of the model.
        """
        dp, pruned = self.groups.dp, self._pruned()
        parts = {part.name: part for part in self._shared(pruned, moments)}
        owners = owner({name: part.nbytes for name, part in parts.items()}, dp.size)
        for name, part in parts.items():
            if owners[name] == dp.rank:
                yield from part.make()
        if self.optimizer.is_sharded and self.groups.shard_copies.rank == 0:
            yield from self._kept(pruned, moments)
            yield from self._kept_entries(pruned)
        for shard in self._of_replica(pruned, moments):
            yield of_rank(shard, data_parallel_rank=dp.rank, data_parallel_size=dp.size)
        shared, copies = dict(self.engine.shared_tensors()), self.groups.copies
        for name, state in self.engine.reducer.state_tensors():
            if self.engine.model_shard.owns(self.engine.infos[name]):
                for shard in self._own_shards(state, shared, pruned):
                    yield of_rank(
                        shard, data_parallel_rank=copies.rank, data_parallel_size=copies.size
                    )

    def _shared(self, pruned: set[str], moments: bool) -> Iterator[_RankPart]:
        """Yield state that is equal on all data-parallel ranks and that this rank's group writes.

        A parameter that is stored in part has its mask saved once, and the stored entries of its
        weight and moments.
        """
        for kind, name, state in self._vectors():
            info = self.engine.infos[name]
            held = self._held(info, pruned)
            if not self.engine.model_shard.owns(info):
                continue
            if kind == PARAM and held.pruned:
                make = partial(_mask_shards, held)
                yield _RankPart(f"{MASK}{name}", info.local_entries, make)
            if (kind == PARAM or moments) and not self.optimizer.is_sharded:
                for file, flat in _per_entry(kind, name, state):
                    make = partial(_shards, held, file, held.stored(flat))
                    yield _RankPart(file, flat.nbytes, make)
                if state.scales is not None:
                    make = partial(self._scale_shards, info, kind, state.scales)
                    yield _RankPart(scale_name(kind, name), state.scales.nbytes, make)
        plain = {f"{BUFFER}{name}": tensor for name, tensor in self.buffers.tensors()}
        for name, state in self.engine.shared_tensors():
            if not isinstance(state, PerEntryState):
                plain[f"{PATH}{name}"] = state
            elif state.sharded:
                continue
            elif self.engine.model_shard.owns(info := self.engine.infos[state.param]):
                make = partial(_entry_shards, self._held(info, pruned), name, state)
                yield _RankPart(f"{ENTRIES}{name}", info.local_entries, make)
        first = self._first_with(list(plain))
        for name, tensor in plain.items():
            if name in first:
                yield _RankPart(name, tensor.nbytes, partial(_whole, name, tensor))

    def _vectors(self) -> Iterator[tuple[str, str, StateVector]]:
        """Yield the states of the optimizer that data-parallel ranks have in common."""
        local = self.engine.local_steps
        for kind, name, state in self.optimizer.vectors():
            if local is None:
                yield kind, name, state
            elif kind == PARAM:
                bucket, where = self.engine.place(name)
                anchor = where.of(local.anchors[bucket.index].weights)
                yield kind, name, dataclasses.replace(state, values=anchor)

    def _of_replica(self, pruned: set[str], moments: bool) -> Iterator[LocalShard]:
        """Yield the states that this replica has alone, if replicas take local steps."""
        if (local := self.engine.local_steps) is None:
            return
        for kind, name, state in self.optimizer.vectors():
            info = self.engine.infos[name]
            bucket, _ = self.engine.place(name)
            is_saved = local.anchors[bucket.index].is_left if kind == PARAM else moments
            if is_saved and self.engine.model_shard.owns(info):
                held = self._held(info, pruned)
                yield from _shards(held, f"{REPLICA}{kind}/{name}", held.stored(state.values))

    def _kept(self, pruned: set[str], moments: bool) -> Iterator[LocalShard]:
        """Yield this rank's shards of weights and moments that data-parallel ranks share out."""
        for kind, name, state in self.optimizer.vectors():
            info = self.engine.infos[name]
            if not self.engine.model_shard.owns(info) or not (kind == PARAM or moments):
                continue
            if state.scales is not None:
                yield from self._scale_shards(info, kind, state.scales)
            mask = f"{MASK}{name}" if name in pruned else None
            for file, flat in _per_entry(kind, name, state):
                if not self._stores_some(info) and self.groups.dp.rank == 0:
                    yield from _shards(self._held(info, pruned), file, flat)
                for part in pieces(self.engine, name, flat):
                    box = tuple(info.logical_shape), part.start, part.stop
                    yield LocalShard(file, part.values, *box, part.flat, mask)

    def _kept_entries(self, pruned: set[str]) -> Iterator[LocalShard]:
        """Yield this rank's shards of the path's state that data-parallel ranks share out."""
        for name, state in self.engine.shared_tensors():
            if not (isinstance(state, PerEntryState) and state.sharded):
                continue
            info = self.engine.infos[state.param]
            if not self.engine.model_shard.owns(info):
                continue
            held, file = self._held(info, pruned), f"{ENTRIES}{name}"
            if self._stores_some(info):
                yield from self._pieces(held, file, state.values())
            elif self.groups.shards.rank == 0:
                yield from _entry_shards(held, name, state)

    def _stores_some(self, info: ParamInfo) -> bool:
        """Return whether any entry is stored of this tensor-parallel rank's part.

        If not, one rank writes the tensor without entries, since a checkpoint has every tensor.
        """
        return self.engine.layout.numel(info.name, info.param) > 0

    def _pieces(
        self, held: LocalParameter, file: str, values: torch.Tensor
    ) -> Iterator[LocalShard]:
        """Yield the shards of per-entry state of the entries that this rank keeps, `values`.

        As in `_entry_shards`, bool state is saved whole, True where not stored.
        """
        name, is_whole = held.info.name, not held.pruned or values.dtype == torch.bool
        for part in pieces(self.engine, name, values):
            box = tuple(held.info.logical_shape), part.start, part.stop
            entries = part.values
            if held.pruned and is_whole:
                stored = held.exists[part.local]
                entries = torch.ones_like(stored).masked_scatter_(stored, entries.cpu())
            mask = None if is_whole else f"{MASK}{name}"
            yield LocalShard(file, entries, *box, part.flat, mask)

    def _own_pieces(
        self, held: LocalParameter, file: str, values: torch.Tensor, mask: str, masked: torch.Tensor
    ) -> Iterator[LocalShard]:
        """Yield the shards of the entries that this rank keeps at which `masked` is False."""
        both = (pieces(self.engine, held.info.name, each) for each in (values, masked))
        for part, left_out in zip(*both, strict=True):
            box = tuple(held.info.logical_shape), part.start, part.stop
            entries = part.values[~left_out.values.to(values.device)]
            yield LocalShard(file, entries, *box, part.flat, mask, mask_value=False)

    def _scale_shards(
        self, info: ParamInfo, kind: str, scales: torch.Tensor
    ) -> Iterator[LocalShard]:
        bucket, _ = self.engine.place(info.name)
        return scale_shards(self.groups, bucket, info, kind, scales)

    def _own_shards(
        self,
        state: PerEntryState,
        shared: Mapping[str, torch.Tensor | PerEntryState],
        pruned: set[str],
    ) -> Iterator[LocalShard]:
        held = self._held(self.engine.infos[state.param], pruned)
        file, values = f"{RESIDUAL}{state.param}", state.values()
        in_pieces = state.sharded and self._stores_some(held.info)
        if state.sharded and not in_pieces and self.groups.shards.rank:
            return iter(())
        if not state.unless:
            shards = self._pieces if in_pieces else _shards
            return shards(held, file, values)
        excluding, name = shared[state.unless], f"{ENTRIES}{state.unless}"
        assert isinstance(excluding, PerEntryState)
        left_out = excluding.values()
        if in_pieces:
            return self._own_pieces(held, file, values, name, left_out)
        if len(held.boxes) == 1:
            ((start, stop), _), shape = held.boxes[0], tuple(held.info.logical_shape)
            chosen = Chosen(
                left_out.numel() - int(left_out.count_nonzero()), lambda: ~excluding.values()
            )
            shard = LocalShard(
                file, values, shape, start, stop, mask=name, mask_value=False, chosen=chosen
            )
            return iter([shard])
        mask = FileMask(name, False, ~held.spread(left_out, True))
        return held.shards(file, values[~left_out.to(values.device)], mask)

    def _held(self, info: ParamInfo, pruned: set[str]) -> LocalParameter:
        return LocalParameter(info, self.engine.layout, info.name in pruned)

    def _pruned(self) -> set[str]:
        """Return the parameters that some rank does not store whole."""
        infos = self.engine.infos.values()
        mine = [
            info.name
            for info in infos
            if self.engine.layout.numel(info.name, info.param) < info.param.numel()
        ]
        texts = self.groups.tp.all_gather_str(json.dumps(mine))
        return {name for text in texts for name in json.loads(text)}

    def _first_with(self, names: list[str]) -> set[str]:
        """Return the names that no lower rank of this copy of the model holds.

        Each tensor is then written once.
        """
        own, found = set(names), set(names)
        for group in (self.groups.tp, self.groups.pp):
            by_rank = [
                set(json.loads(text)) for text in group.all_gather_str(json.dumps(sorted(own)))
            ]
            found = found.difference(*by_rank[: group.rank])
            own = own.union(*by_rank)
        return found

    # ---- reading -------------------------------------------------------------------------------

    def take(self, saved: Checkpoint, *, moments: bool) -> set[str]:
        """Load weights and buffers, and with `moments` the moments, in place.

        Returns:
            The kinds of states that were encoded again, since the checkpoint has them in another
            format or with other blocks.

        Raises:
            CheckpointError: The checkpoint lacks one of them.
        """
        stored = set(saved.names())
        if lost := [name for name, _ in self.buffers.tensors() if f"{BUFFER}{name}" not in stored]:
            raise CheckpointError(
                f"{saved.path}: has no {BUFFER}{lost[0]}: it is of another model; give the "
                "checkpoint of a run with this model"
            )
        self.buffers.load(
            {name: saved.read(f"{BUFFER}{name}") for name, _ in self.buffers.tensors()}
        )
        encoded: set[str] = set()
        for kind, name, state in self.optimizer.vectors():
            if kind != PARAM and not moments:
                continue
            held = LocalParameter(self.engine.infos[name], self.engine.layout, pruned=False)
            if kind != PARAM and f"{REPLICA}{kind}/{name}" in stored:
                encode(self.engine, name, state, self._of_replicas(saved, kind, held))
                continue
            if f"{kind}/{name}" not in stored:
                raise CheckpointError(
                    f"{saved.path}: has no {kind}/{name}: it was saved without optimizer state or "
                    "by another optimizer; give --load, --no-load-optim and another --run-dir to "
                    "start that from nothing"
                )
            if not self._take_as_is(saved, kind, held, state):
                encode(self.engine, name, state, _decoded(saved, kind, held))
                # fp32 has every number of the other formats.
                encoded |= set() if state.is_fp32 else {kind}
        return encoded

    def _of_replicas(self, saved: Checkpoint, kind: str, held: LocalParameter) -> torch.Tensor:
        """Read this replica's own state; the mean of all where the run has others, or none."""
        ranks = 0 if self.engine.local_steps is None else self.groups.dp.size
        return held.read_own(saved, f"{REPLICA}{kind}/{held.info.name}", self.groups.dp.rank, ranks)

    def _take_as_is(
        self, saved: Checkpoint, kind: str, held: LocalParameter, state: StateVector
    ) -> bool:
        """Read a state that is saved in its format and with its blocks; False if it is not."""
        info = held.info
        name = info.name
        scaled, compensated = (
            scale_name(kind, name) in saved,
            compensation_name(kind, name) in saved,
        )
        saved_format = saved.dtype(f"{kind}/{name}"), scaled, compensated
        own_format = state.values.dtype, state.scales is not None, state.compensation is not None
        if saved_format != own_format:
            return False
        if state.scales is not None:
            mine = [box for box, _ in held.boxes]
            if not has_same_blocks(saved, self.groups, info, kind, mine, held.exists):
                return False
            bucket, _ = self.engine.place(name)
            read_scales(saved, self.groups, bucket, info, kind, state.scales)
        for file, flat in _per_entry(kind, name, state):
            if self.optimizer.is_sharded and self.engine.layout.mask(name) is None:
                self._read_kept(saved, file, name, flat)
            elif flat.numel():
                fill(self.engine, name, flat, held.read(saved, file))
        return True

    def _read_kept(self, saved: Checkpoint, file: str, name: str, flat: torch.Tensor) -> None:
        """Read the entries that this rank keeps of a state that is stored whole, and no others."""
        flat.zero_()  # vocabulary padding is in no file
        for part in pieces(self.engine, name, flat):
            box = {"box_start": part.start, "box_stop": part.stop}
            first, past = part.flat or (0, volume((part.start, part.stop)))
            part.values.copy_(saved.read_flat(file, first, past, **box))

    def take_path(self, saved: Checkpoint) -> None:
        """Load the state of the gradient path. Collective over the world."""
        self.groups.world.raise_on_all_ranks(lambda: self._take_path(saved))
        self.groups.world.raise_on_all_ranks(lambda: self._take_round(saved))

    def _take_round(self, saved: Checkpoint) -> None:
        """Load the weights that this replica had inside a round of local steps."""
        if (local := self.engine.local_steps) is None:
            return
        for name in saved.names(f"{REPLICA}{PARAM}/"):
            if (held := self._part_of(name)) is None:
                continue
            replicas, here = saved.shape(name)[0], self.groups.dp.size
            if replicas != here:
                raise CheckpointError(
                    f"{saved.path}: was saved inside a round of local steps, in which its "
                    f"{replicas} replicas differ, and this run has {here}; resume on {replicas} "
                    "data-parallel ranks to the end of a round, or give --load, "
                    "--reset-grad-state and a new --run-dir to start from the last average"
                )
            bucket, where = self.engine.place(held.info.name)
            master = where.of(self.optimizer.states[bucket.index].master)
            fill(self.engine, held.info.name, master, self._of_replicas(saved, PARAM, held))
            local.anchors[bucket.index].is_left = True
        self.optimizer.copy_to_params()

    def _take_path(self, saved: Checkpoint) -> None:
        if saved.names(_OLD_INDEX):
            raise CheckpointError(
                f"{saved.path}: an earlier version of this program saved what Radius had chosen in "
                "another form; give --load, --reset-grad-state and a new --run-dir to leave that "
                "behind"
            )
        shared = {name.removeprefix(PATH): partial(saved.read, name) for name in saved.names(PATH)}
        own: dict[str, Callable[[], torch.Tensor]] = {}
        copies = self.groups.copies
        for name in saved.names(ENTRIES):
            if (held := self._part_of(name)) is not None:
                shared[name.removeprefix(ENTRIES)] = partial(_read, held, saved, name)
        for name in saved.names(RESIDUAL):
            if (held := self._part_of(name)) is not None:
                own[held.info.name] = partial(
                    _read_own, held, saved, name, copies.rank, copies.size
                )
        self.engine.load_state_tensors(_Reading(own), _Reading(shared))

    def _part_of(self, name: str) -> LocalParameter | None:
        """Return this rank's part of the parameter at the end of `name`; None if it has none."""
        info = self.engine.infos.get(name.rpartition("/")[2])
        if info is None:
            return None
        return LocalParameter(
            info, self.engine.layout, self.engine.layout.mask(info.name) is not None
        )


class _Reading(Mapping[str, torch.Tensor]):
    """Tensors of a checkpoint, read on access, so that they are not all in memory at once."""

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


def _per_entry(kind: str, name: str, state: StateVector) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state with one number for each entry, by name in a checkpoint."""
    yield f"{kind}/{name}", state.values
    if state.compensation is not None:
        yield compensation_name(kind, name), state.compensation


def _decoded(saved: Checkpoint, kind: str, held: LocalParameter) -> torch.Tensor:
    """Read all entries of the part of a state in any format, fp32."""
    name = held.info.name
    if scale_name(kind, name) in saved:
        return decoded(saved, kind, name, held.boxes, held.info.local_shape)
    values = held.read(saved, f"{kind}/{name}")
    if (file := compensation_name(kind, name)) in saved:
        values = values.float().add_(held.read(saved, file))
    return values


def _shards(held: LocalParameter, file: str, values: torch.Tensor) -> Iterator[LocalShard]:
    """Yield the shards of stored entries, with the mask of their positions."""
    name = held.info.name
    mask = FileMask(f"{MASK}{name}", True, held.exists) if held.pruned else None
    return held.shards(file, values, mask)


def _mask_shards(held: LocalParameter) -> Iterator[LocalShard]:
    return held.shards(f"{MASK}{held.info.name}", held.exists)


def _entry_shards(held: LocalParameter, name: str, state: PerEntryState) -> Iterator[LocalShard]:
    """Return the shards of per-entry state; bool state is saved whole, True where not stored."""
    values, file = state.values(), f"{ENTRIES}{name}"
    if values.dtype != torch.bool:
        return _shards(held, file, values)
    return held.shards(file, held.spread(values, True))


def _whole(name: str, tensor: torch.Tensor) -> Iterator[LocalShard]:
    yield whole(name, tensor)


def _read(held: LocalParameter, saved: Checkpoint, name: str) -> torch.Tensor:
    return held.pick(held.read(saved, name))


def _read_own(
    held: LocalParameter, saved: Checkpoint, name: str, rank: int, ranks: int
) -> torch.Tensor:
    return held.pick(held.read_own(saved, name, rank, ranks))
