"""Statistics of Radius: numbers for log line and metrics, and notes for the log.

All numbers are of the whole model: of the ranks that hold a copy of an entry, one counts it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.data_parallel.bucket import GradBucket
from megatron.data_parallel.reducer import ReducerStats
from megatron.parallel.tensor_shard import ModelShard
from radius.bucket import RadiusBucket
from radius.memory import memory_note, radius_bytes
from radius.schedule import RadiusSettings

if TYPE_CHECKING:
    import torch


class RadiusStats:
    """The counters and notes since the last call of `stats`.

    `model_shard` is this rank's part of the model. `keeps_rounding`: whether the residual also
    keeps what the wire rounds off.
    """

    def __init__(
        self, settings: RadiusSettings, model_shard: ModelShard, *, keeps_rounding: bool
    ) -> None:
        self._settings, self._model_shard = settings, model_shard
        self._keeps_rounding = keeps_rounding
        self._sent = self._stored = self._chosen = 0
        self._kept: int | torch.Tensor = 0
        self._tells_memory = False
        self._notes: list[str] = []

    def attached(self) -> None:
        """Note that the buckets exist; the next `stats` reports their memory."""
        self._tells_memory = self._settings.density < 1

    def sent(self, bucket: GradBucket, entries: int) -> None:
        """Count `entries` sent entries of a bucket."""
        if self._model_shard.owns(bucket):
            self._stored += bucket.numel
            self._sent += entries

    def chose(self, bucket: GradBucket, before: int, kept: int | torch.Tensor) -> None:
        """Record that `kept` of `before` selected entries were selected again.

        The next `stats` waits for a tensor (int64 []) of a GPU.
        """
        if self._model_shard.owns(bucket):
            self._chosen += before
            self._kept += kept

    def switched(self, t: int) -> None:
        """Note that entries are selected for the first time, after update `t`."""
        settings = self._settings
        how = (
            f"all of it again every {settings.interval} steps"
            if settings.schedule == "paper"
            else f"and one of {settings.interval} parts of it whole, in turn"
        )
        self._notes.append(
            f"radius: on from here, after update {t}: {float(settings.density):.4g} of "
            f"each matrix's gradient is sent, {how}"
        )

    def stats(
        self, whole: ReducerStats, buckets: Sequence[RadiusBucket], *, on: bool, full: bool
    ) -> ReducerStats:
        """Return and reset the statistics, with the bytes and waits of `whole`.

        `on`: an index exists. `full`: include the norm of the residual, which needs a pass over it.
        Collective over the ranks of a copy of the model.
        """
        counted = [own for own in buckets if self._model_shard.owns(own.bucket)]
        if self._tells_memory:
            self._tells_memory = False
            self._notes = [note for note in (self._memory(buckets), *self._notes) if note]
        tells_norm = full and self._settings.residual != "none"
        waits = sum(own.squared_norm() for own in counted) if tells_norm and on else 0.0
        mine = [self._sent, self._stored, self._chosen, int(self._kept), waits, on]
        sent, stored, chosen, kept, waits, began = self._model_shard.total(mine)
        extra: dict[str, float] = {}
        if tells_norm and began:
            extra["residual_norm"] = math.sqrt(waits)
        if chosen:
            extra["index_kept"] = kept / chosen
        density, notes = sent / stored if stored else 1.0, tuple(self._notes)
        self._sent = self._stored = self._chosen = self._kept = 0
        self._notes = []
        return dataclasses.replace(whole, density=density, extra=extra, notes=notes)

    def _memory(self, buckets: Sequence[RadiusBucket]) -> str:
        """Return the note on the memory of the whole model; "" if there is no matrix."""
        settings, grad = self._settings, buckets[0].bucket.grad
        counted = [own for own in buckets if self._model_shard.owns(own.bucket)]
        matrices = [part.length for own in counted for part in own.parts]
        rolling, bits = settings.schedule == "rolling", buckets[0].bits
        kinds = radius_bytes(
            matrices,
            density=settings.density,
            residual=settings.residual,
            rolling_interval=settings.interval if rolling else None,
            value_bytes=grad.element_size(),
            bits=bits,
            keeps_rounding=self._keeps_rounding,
        )
        entries, *sizes = self._model_shard.total([sum(matrices), *kinds.values()])
        if not entries:
            return ""
        whole = {kind: int(size) for kind, size in zip(kinds, sizes, strict=True)}
        return memory_note(int(entries), whole, grad.device.type, bits=bits)
