"""Sentence pairs from text: Tatoeba's archives, two plain files, and their split."""

from __future__ import annotations

import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.local_file import one_line, read_text, require_regular
from megatron.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")
ENGLISH = "en"
_UNREADABLE = (
    (zipfile.BadZipFile, zlib.error, OSError, EOFError)
    # A method of compression that is not known, and an archive with a password.
    + (NotImplementedError, RuntimeError)
)


@dataclass(frozen=True)
class RawPair:
    """A sentence and its translation, with single blanks between words."""

    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class RawPairs:
    """Pairs as they were read; `empty` counts those left out because a side held no text."""

    pairs: list[RawPair]
    empty: int


def read_tatoeba(path: Path, *, source_lang: str, target_lang: str) -> RawPairs:
    """Read an archive of tab-delimited pairs, English first, as manythings.org/anki has them.

    Args:
        path: A .zip with one .txt of pairs (beside `_about.txt`); a third column is left out.
        source_lang: Language code of the sources.
        target_lang: Language code of the targets; one of the two is "en".

    Raises:
        ConfigError: Neither language, or both, is English.
        DataError: The archive is missing or damaged, or a line holds no pair.
    """
    if (source_lang == ENGLISH) == (target_lang == ENGLISH):
        raise ConfigError(
            f"--source-lang {source_lang} --target-lang {target_lang}: one of them must be "
            f"{ENGLISH}, the first column of such an archive"
        )
    name, content = _member(path)
    where = f"{path}: {name}"

    def split(number: int, line: str) -> tuple[str, str]:
        columns = line.split("\t")
        if len(columns) not in (2, 3):
            raise DataError(
                f"{where}:{number}: {len(columns)} columns, {one_line(line, longest=60)!r}; wanted "
                "a sentence, a tab and its translation"
            )
        return columns[0], columns[1]

    rows = (split(number, line) for number, line in enumerate(_lines(content, where), 1))
    return _clean(rows if source_lang == ENGLISH else ((second, first) for first, second in rows))


def read_two_files(source: Path, target: Path) -> RawPairs:
    """Read two plain UTF-8 files, a sentence a line; line n of one translates line n of the other.

    Raises:
        DataError: A file is missing or not UTF-8, or their numbers of lines differ.
    """
    sources, targets = _split_lines(read_text(source)), _split_lines(read_text(target))
    if len(sources) != len(targets):
        raise DataError(
            f"{source}: {len(sources)} lines, but {target} has {len(targets)}; a line of one must "
            "be the translation of the same line of the other"
        )
    return _clean(zip(sources, targets, strict=True))


def sentence_key(sentence: str) -> str:
    """Return a text that is equal for sentences that differ in case or Unicode form alone.

    Canonical caseless matching (The Unicode Standard, 3.13, D145), without blanks at the ends.
    """
    folded = unicodedata.normalize("NFD", sentence).casefold()
    return unicodedata.normalize("NFC", folded).strip()


def split_pairs(
    pairs: Sequence[RawPair], *, keys: Sequence[str], shares: Sequence[float], seed: int
) -> Mapping[str, list[RawPair]]:
    """Shuffle pairs and split them so that no key is in two splits.

    Args:
        pairs: The pairs.
        keys: A text for each pair: pairs of one key stay together.
        shares: Shares of the keys for train, valid and test, in any scale.
        seed: Seed of both shuffles, of the keys and of each split's pairs.

    Returns:
        The pairs of each of `SPLITS`.
    """
    draw = np.random.RandomState(seed)  # whose numbers no version of numpy changes
    groups: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    members = list(groups.values())
    order = draw.permutation(len(members))
    ends = np.rint(np.cumsum(shares) / sum(shares) * len(members)).astype(int)
    found = {}
    for name, start, end in zip(SPLITS, [0, *ends[:-1]], ends, strict=True):
        places = [place for group in order[start:end] for place in members[group]]
        found[name] = [pairs[places[row]] for row in draw.permutation(len(places))]
    return found


def _member(path: Path) -> tuple[str, str]:
    """Return the name and the text of the one file of pairs in an archive."""
    require_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.endswith(".txt") and not name.rpartition("/")[2].startswith("_")
            ]
            if len(names) != 1:
                raise DataError(f"{path}: holds {len(names)} files of pairs (*.txt); wanted one")
            raw = archive.read(names[0])
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be unpacked: {one_line(error)}") from error
    try:
        return names[0], raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"{path}: {names[0]}:{line}: not UTF-8") from error


def _lines(content: str, where: str) -> Iterator[str]:
    lines = _split_lines(content)
    if not any(lines):
        raise DataError(f"{where}: holds no line")
    yield from lines


def _split_lines(content: str) -> list[str]:
    """Split at line feeds alone: other separators of lines occur inside sentences."""
    return content.removesuffix("\n").split("\n")


def _clean(rows: Iterable[tuple[str, str]]) -> RawPairs:
    pairs, empty = [], 0
    for row in rows:
        source, target = (" ".join(text.split()) for text in row)
        if source and target:
            pairs.append(RawPair(source, target))
        else:
            empty += 1
    return RawPairs(pairs=pairs, empty=empty)
