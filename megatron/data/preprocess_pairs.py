"""Preprocessing of sentence pairs into the files that training reads.

PREFIX.bpe.json                    the joint BPE, learned from the training pairs
PREFIX.LANG.dict.txt               the dictionary of a language
PREFIX.SPLIT.LANG.{bin,idx,json}   token ids, a sentence a sequence, each ended by EOS
PREFIX.SPLIT.LANG.txt              the sentences of valid and test, lowercased, for BLEU

Each file appears whole or not at all; the BPE comes last, when all others are complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.data.dictionary import EOS, Dictionary
from megatron.data.indexed_dataset import IndexedDatasetWriter, optimal_dtype
from megatron.data.local_file import stat_of
from megatron.data.pair_bpe import PairBPE, pair_fingerprint, train_pair_bpe
from megatron.data.raw_pairs import SPLITS, RawPair, split_pairs
from megatron.data.sidecar import write_atomically
from megatron.errors import ConfigError, DataError

HELD_BACK = ("valid", "test")


@dataclass(frozen=True)
class PairPaths:
    """The files of a translation's data.

    Args:
        prefix: The path that all names begin with.
        source_lang: Language code of the sources.
        target_lang: Language code of the targets.
    """

    prefix: str
    source_lang: str
    target_lang: str

    @property
    def languages(self) -> tuple[str, str]:
        """The language of the source, then that of the target."""
        return self.source_lang, self.target_lang

    @property
    def bpe(self) -> Path:
        """The file of the joint BPE."""
        return Path(f"{self.prefix}.bpe.json")

    def dictionary(self, language: str) -> Path:
        """Return the dictionary file of a language."""
        return Path(f"{self.prefix}.{language}.dict.txt")

    def tokens(self, split: str, language: str) -> str:
        """Return the prefix of the `.bin/.idx` pair of a split and a language."""
        return f"{self.prefix}.{split}.{language}"

    def text(self, split: str, language: str) -> Path:
        """Return the file of a split's sentences."""
        return Path(f"{self.prefix}.{split}.{language}.txt")

    def written(self) -> list[Path]:
        """Return the files whose presence means that data were written under the prefix."""
        pairs = [self.tokens(split, language) for split in SPLITS for language in self.languages]
        return [self.bpe, *map(self.dictionary, self.languages), *(Path(f"{p}.idx") for p in pairs)]


@dataclass(frozen=True, kw_only=True)
class PairCounts:
    """The outcome of preprocessing.

    `pairs` counts the pairs of each split, `too_long` those left out, `merges` the merges that the
    BPE learned, and `entries` the entries of the source's and the target's dictionary.
    """

    pairs: Mapping[str, int]
    too_long: int
    merges: int
    entries: tuple[int, int]


def preprocess_pairs(
    pairs: Sequence[RawPair],
    paths: PairPaths,
    *,
    merges: int,
    longest: int,
    shares: Sequence[float],
    seed: int,
    split_by: str,
    overwrite: bool = False,
) -> PairCounts:
    """Split pairs, learn the BPE and the dictionaries from the training pairs, write all files.

    Args:
        pairs: Sentences and their translations.
        paths: The files to write.
        merges: Merges of the joint BPE.
        longest: Tokens of the longest sentence, its end included, of pairs that are kept.
        shares: Shares of train, valid and test.
        seed: Seed of the split.
        split_by: The language whose sentences are in one split each, whatever their case.
        overwrite: Whether files under the prefix are replaced.

    Raises:
        ConfigError: Files are there already, or a setting is out of range.
        DataError: There are no pairs to train on, or the disk refuses a file.
    """
    _refuse_existing(paths, overwrite)
    of_key = paths.languages.index(split_by)
    keys = [(pair.source, pair.target)[of_key].lower() for pair in pairs]
    split = split_pairs(pairs, keys=keys, shares=shares, seed=seed)
    training = split["train"]
    if not training:
        raise DataError(f"{len(pairs)} pairs leave none for training; give --split a larger share")
    texts = [pair.source for pair in training] + [pair.target for pair in training]
    bpe = train_pair_bpe(texts, merges=merges)

    kept: dict[str, tuple[list[RawPair], list[list[list[str]]]]] = {}
    too_long = 0
    for name, found in split.items():
        sides = [bpe.split([p.source for p in found]), bpe.split([p.target for p in found])]
        # The end of the sentence is a token too.
        short = [i for i in range(len(found)) if max(len(s[i]) for s in sides) < longest]
        too_long += len(found) - len(short)
        kept[name] = [found[i] for i in short], [[side[i] for i in short] for side in sides]
    if not kept["train"][0]:
        raise DataError(f"--longest: every training pair is longer than {longest} tokens; raise it")
    dictionaries = [Dictionary.of(side) for side in kept["train"][1]]
    _prepare_folder(paths)
    for name, (found, sides) in kept.items():
        for language, side, dictionary in zip(paths.languages, sides, dictionaries, strict=True):
            _write_tokens(paths.tokens(name, language), side, dictionary, bpe)
        if name in HELD_BACK:
            for language, texts in zip(
                paths.languages,
                ([p.source for p in found], [p.target for p in found]),
                strict=True,
            ):
                content = "".join(f"{bpe.normalize(text)}\n" for text in texts)
                write_atomically(paths.text(name, language), content.encode())
    for language, dictionary in zip(paths.languages, dictionaries, strict=True):
        dictionary.save(paths.dictionary(language))
    # Last: its presence says that the rest is complete.
    bpe.save(paths.bpe)
    return PairCounts(
        pairs={name: len(found) for name, (found, _) in kept.items()},
        too_long=too_long,
        merges=bpe.merges,
        entries=(len(dictionaries[0]), len(dictionaries[1])),
    )


def _write_tokens(
    prefix: str, side: Sequence[Sequence[str]], dictionary: Dictionary, bpe: PairBPE
) -> None:
    if not side:
        return
    with IndexedDatasetWriter(prefix, optimal_dtype(len(dictionary))) as writer:
        for symbols in side:
            writer.add_document(dictionary.encode(symbols))
        writer.close(
            tokenizer={
                "type": "pair BPE",
                "vocab_size": len(dictionary),
                "eod": EOS,
                "fingerprint": pair_fingerprint(bpe.text, dictionary),
            }
        )


def _refuse_existing(paths: PairPaths, overwrite: bool) -> None:
    found = [path for path in paths.written() if stat_of(path) is not None]
    if found and not overwrite:
        raise ConfigError(f"--output-prefix: {found[0]} exists; choose another or add --overwrite")
    for path in found:
        # An old file must not pass for one of the new data where a split stays empty.
        try:
            path.unlink()
        except OSError as error:
            raise DataError(f"{path}: cannot be removed: {error.strerror}") from error


def _prepare_folder(paths: PairPaths) -> None:
    folder = paths.bpe.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror}") from error
