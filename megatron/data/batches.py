"""The interface between the trainer and the data of a task: batches and their readers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class Batch(Protocol):
    """A microbatch, as the trainer sees it; a task's batches have further fields.

    It is a dataclass, and its tensors are fields, where `Prefetcher` and `copy_to` find them.
    """

    @property
    def index(self) -> int:
        """The number of the microbatch in the global batch, over all ranks."""
        ...

    @property
    def counted(self) -> int:
        """The tokens or images whose losses the sums add up; padding counts 0.

        Sums are divided by the total of the global batch.
        """
        ...

    @property
    def uneven(self) -> bool:
        """True if data-parallel ranks may count differently, so that they must add up their counts.

        It is equal for all microbatches of a global batch, on every rank.
        """
        ...


class Reader(Protocol):
    """A reader of one rank's microbatches of a data set: any global batch, in any order.

    A thread may read training batches while another one reads those of an evaluation, so readers of
    different data sets share nothing that `read` changes.
    """

    @property
    def samples(self) -> int:
        """The number of samples of the data set, equal on every rank."""
        ...

    def read(self, first_sample: int, global_batch_size: int) -> Iterator[Batch]:
        """Yield this rank's part of samples [first_sample, first_sample + global_batch_size).

        The microbatches are those of `MicrobatchSampler`. Samples past the end are padding: they
        fill a microbatch and do not count, and the whole global batch is then `uneven`.

        Raises:
            DataError: A sample cannot be read.
        """
        ...

    def fingerprint(self) -> str:
        """Return a text that differs between ranks which read other data; see `fingerprint_of`."""
        ...


@runtime_checkable
class OrderedReader(Protocol):
    """A reader whose order of samples depends on the length of the run."""

    def order(self, count: int) -> str:
        """Return a text that differs from that of a run whose first `count` samples are others."""
        ...


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The readers of a run; those of validation and test may be absent."""

    train: Reader | None
    """None only for a run that does not train (`--skip-train`)."""
    valid: Reader | Mapping[str, Reader] | None = None
    """Several by name are evaluated one after the other, each with its means."""
    test: Reader | None = None


def fingerprint_of(samples: int, content: Callable[[int], bytes]) -> str:
    """Return the number of samples, and a digest of the `content` of the first, middle and last."""
    if not samples:
        return "none"
    digest = hashlib.sha256()
    for number in (0, samples // 2, samples - 1):
        digest.update(content(number))
    return f"{samples} samples, {digest.hexdigest()[:16]}"
