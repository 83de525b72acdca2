"""Packs of sentence pairs: the samples of a translation run.

A pack holds pairs of similar lengths, as many as fit into a number of padded tokens. Pairs are
sorted by length and cut into packs; the order of packs, and that of pairs of equal lengths, depends
on (seed, epoch) alone:

    sorted   |2|2|3|3|4|4|5|7|8|    packs of 12 tokens   |2 2 3 3|4 4|5|7|8|
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.dictionary import EOS, PAD, Dictionary
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.local_file import read_text
from megatron.data.pair_bpe import PairBPE, pair_fingerprint
from megatron.data.preprocess_pairs import PairPaths
from megatron.data.sidecar import check_sizes, read_sidecar, sidecar_path
from megatron.errors import ConfigError, DataError

_EPOCHS_HELD = 2
"""Orders in memory: a global batch may cross the end of an epoch."""


@dataclass(frozen=True, kw_only=True)
class PairTokens:
    """Pairs as matrices, padded on the right with `PAD`.

    `source` [b, s] and `targets` [b, t] end in `EOS`; `inputs` [b, t] are the targets moved to the
    right, after an `EOS`, as fairseq's decoder reads them. int64 all.
    """

    source: NDArray[np.int64]
    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]

    @property
    def counted(self) -> int:
        """The number of target tokens."""
        return int(np.count_nonzero(self.targets != PAD))


@dataclass(frozen=True, kw_only=True)
class PairVocabulary:
    """The text of the BPE's file `path`, and the dictionaries, which map sentences to token ids."""

    path: Path
    text: str
    source: Dictionary
    target: Dictionary

    @classmethod
    def load(cls, paths: PairPaths) -> PairVocabulary:
        """Read the files. Raises `DataError` naming a file that is missing or damaged."""
        source, target = (Dictionary.load(paths.dictionary(lang)) for lang in paths.languages)
        return cls(path=paths.bpe, text=read_text(paths.bpe), source=source, target=target)

    def bpe(self) -> PairBPE:
        """Return the BPE, to encode text. Training needs neither it nor its package."""
        return PairBPE(self.text, where=self.path)

    def fingerprints(self) -> tuple[str, str]:
        """Return the fingerprints of the source's data and of the target's."""
        source, target = (pair_fingerprint(self.text, side) for side in (self.source, self.target))
        return source, target


class PairDataset:
    """The pairs of one split.

    Args:
        paths: The files of the data.
        split: "train", "valid" or "test".
        vocabulary: The vocabulary that made the data; data of another one are refused.

    Raises:
        DataError: A file is missing, damaged or made with another vocabulary, or the two sides do
            not belong together.
    """

    def __init__(self, paths: PairPaths, split: str, vocabulary: PairVocabulary) -> None:
        self.prefixes = [paths.tokens(split, language) for language in paths.languages]
        self._dictionaries = (vocabulary.source, vocabulary.target)
        for prefix, fingerprint in zip(self.prefixes, vocabulary.fingerprints(), strict=True):
            _check_sidecar(prefix, fingerprint)
        self._source, self._target = (IndexedDataset(prefix) for prefix in self.prefixes)
        if len(self._source) != len(self._target):
            raise DataError(
                f"{self.prefixes[0]}: {len(self._source)} sentences, but {self.prefixes[1]} has "
                f"{len(self._target)}; write the data again"
            )
        self.source_lengths = np.asarray(self._source.sequence_lengths, dtype=np.int64)
        self.target_lengths = np.asarray(self._target.sequence_lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the longer side of each pair, int64 [pairs]."""
        return np.maximum(self.source_lengths, self.target_lengths)

    def source(self, pair: int) -> NDArray[np.int64]:
        """Return the source tokens of a pair, its `EOS` included."""
        return self._read(0, pair)

    def target(self, pair: int) -> NDArray[np.int64]:
        """Return the target tokens of a pair, its `EOS` included."""
        return self._read(1, pair)

    def tokens(self, pairs: NDArray[np.int64]) -> PairTokens:
        """Read pairs as padded matrices.

        Raises:
            DataError: A token is not in the dictionary, or a file changed while in use.
        """
        source = _padded([self.source(int(pair)) for pair in pairs])
        targets = _padded([self.target(int(pair)) for pair in pairs])
        inputs = np.concatenate((np.full_like(targets[:, :1], EOS), targets[:, :-1]), axis=1)
        # A shorter sentence's own EOS moved to the right, where no token follows.
        inputs[targets == PAD] = PAD
        return PairTokens(source=source, inputs=inputs, targets=targets)

    def _read(self, side: int, pair: int) -> NDArray[np.int64]:
        data = (self._source, self._target)[side]
        if pair % 1024 == 0:
            data.check_unchanged()
        found = data.get(pair).astype(np.int64)
        entries = len(self._dictionaries[side])
        if found.max(initial=0) >= entries or found.min(initial=EOS) < EOS or found[-1:] != [EOS]:
            raise DataError(
                f"{self.prefixes[side]}: sentence {pair} does not hold ids from {EOS} to "
                f"{entries - 1} that end in {EOS}; write the data again"
            )
        return found


class Packs:
    """The packs of a data set, at most `max_tokens` padded tokens each.

    A pack's tokens are its number of pairs times the longest sentence among them, source or target.
    Every epoch has the same number of packs.

    Args:
        dataset: The pairs.
        max_tokens: Padded tokens of a pack.
        seed: Seed of the order.

    Raises:
        ConfigError: A pair is longer than a pack.
    """

    def __init__(self, dataset: PairDataset, *, max_tokens: int, seed: int) -> None:
        self.dataset, self.max_tokens, self._seed = dataset, max_tokens, seed
        check_longest(dataset, max_tokens, "max_tokens")
        # Ties may be broken in any order: the sorted lengths, and so the cuts, stay the same.
        lengths = dataset.lengths[self._sorted(np.arange(len(dataset)))]
        self._starts = cut_by_tokens(lengths, max_tokens)
        self._orders: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = OrderedDict()

    @property
    def per_epoch(self) -> int:
        """Packs of an epoch."""
        return len(self._starts) - 1

    def pairs(self, sample: int) -> NDArray[np.int64]:
        """Return the numbers of the pairs in sample `sample` of the run, a pack of any epoch."""
        epoch, number = divmod(sample, self.per_epoch)
        places, packs = self._order(epoch)
        pack = packs[number]
        return places[self._starts[pack] : self._starts[pack + 1]]

    def digest(self) -> str:
        """Return a digest of the lengths, and of the tokens of the first, middle and last pair."""
        found = hashlib.sha256()
        for lengths in (self.dataset.source_lengths, self.dataset.target_lengths):
            found.update(lengths.tobytes())
        for pair in (0, len(self.dataset) // 2, len(self.dataset) - 1):
            found.update(self.dataset.source(pair).tobytes())
            found.update(self.dataset.target(pair).tobytes())
        return found.hexdigest()[:16]

    def shapes(self) -> NDArray[np.int64]:
        """Return (pairs, padded source length, padded target length) of each pack, [packs, 3].

        Packs are in order of length; their shapes are the same in every epoch.
        """
        found = []
        places, _ = self._order(0)
        for start, stop in zip(self._starts[:-1], self._starts[1:], strict=True):
            inside = places[start:stop]
            longest = self.dataset.source_lengths[inside].max()
            found.append((stop - start, longest, self.dataset.target_lengths[inside].max()))
        return np.array(found, dtype=np.int64)

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pairs of an epoch, sorted by length, and the order of its packs."""
        if epoch not in self._orders:
            draw = np.random.RandomState([self._seed, epoch])
            shuffled = draw.permutation(len(self.dataset))
            self._orders[epoch] = self._sorted(shuffled), draw.permutation(self.per_epoch)
            if len(self._orders) > _EPOCHS_HELD:
                self._orders.popitem(last=False)
        return self._orders[epoch]

    def _sorted(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return pairs sorted by source length, then target length, else in the order given."""
        source, target = self.dataset.source_lengths, self.dataset.target_lengths
        return places[np.lexsort((target[places], source[places]))]


def check_longest(dataset: PairDataset, limit: int, setting: str) -> None:
    """Raise `ConfigError` where a pair is longer than `limit` tokens, the value of `setting`."""
    longest = int(dataset.lengths.max())
    if longest > limit:
        pair = int(dataset.lengths.argmax())
        raise ConfigError(
            f"{setting}: {limit} is less than the {longest} tokens of pair {pair} of "
            f"{dataset.prefixes[0]}; raise it, or write the data again with --longest {limit}"
        )


def cut_by_tokens(lengths: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Cut a sequence of pairs into runs of at most `limit` padded tokens, greedily.

    Args:
        lengths: Tokens of the longer side of each pair; none is above the limit.
        limit: Tokens of a run: its longest pair times its number of pairs.

    Returns:
        The first pair of each run, and the number of pairs at the end: int64 [runs + 1].
    """
    starts, longest = [0], 0
    for place, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if longest * (place + 1 - starts[-1]) > limit:
            starts.append(place)
            longest = length
    return np.array([*starts, len(lengths)], dtype=np.int64)


def _padded(rows: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    found = np.full((len(rows), max(map(len, rows))), PAD, dtype=np.int64)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found


def _check_sidecar(prefix: str, fingerprint: str) -> None:
    described = read_sidecar(prefix)
    check_sizes(prefix)
    if described is None:
        raise DataError(
            f"{sidecar_path(prefix)}: no such file; write the data with tools/preprocess_pairs.py"
        )
    if described.get("fingerprint") != fingerprint:
        raise DataError(
            f"{prefix}: made with another BPE or dictionary than the files beside it; write the "
            "data again"
        )
