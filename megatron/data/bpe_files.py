"""The two files of a GPT-2 style BPE, read and checked: ids by token, and merges by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.data.local_file import read_json_object, read_text
from megatron.errors import DataError

END_OF_TEXT = "<|endoftext|>"
"""GPT-2's mark between documents."""


def read_vocab(path: str, *, alphabet: Iterable[str]) -> dict[str, int]:
    """Ids by token; DataError on an id that is no number, occurs twice or leaves a gap.

    Every symbol of `alphabet` (the 256 that stand for bytes) and the end mark must be there: the
    encoder would drop the bytes that have none.
    """
    vocab = read_json_object(path)
    owners: dict[int, str] = {}
    for token, id in vocab.items():
        if not isinstance(id, int) or isinstance(id, bool) or id < 0:
            raise DataError(f"{path}: {token!r} has id {id!r}; wanted a whole number from 0")
        if id in owners:
            raise DataError(f"{path}: {owners[id]!r} and {token!r} both have id {id}")
        owners[id] = token
    gap = next((id for id in range(len(vocab)) if id not in owners), None)
    if gap is not None:
        raise DataError(f"{path}: {len(vocab)} entries, but none has id {gap}; wanted no gap")
    if END_OF_TEXT not in vocab:
        raise DataError(f"{path}: has no {END_OF_TEXT} entry, which ends documents; add it")
    bare = sorted(symbol for symbol in alphabet if symbol not in vocab)
    if bare:
        raise DataError(
            f"{path}: lacks {len(bare)} of the 256 byte symbols ({bare[0]!r}, ...); not the "
            "vocabulary of a byte-level BPE"
        )
    return vocab


def read_merges(path: str, *, vocab: Mapping[str, int], vocab_file: str) -> list[tuple[str, str]]:
    """Merges by rank; the file's order is the rank, so no line may be bad or occur twice."""
    merges: list[tuple[str, str]] = []
    lines: dict[tuple[str, str], int] = {}
    # Not splitlines(): the alphabet holds U+0085 and other characters that it breaks lines at.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise DataError(f"{path}:{number}: {line[:40]!r} is not two parts set apart by a space")
        pair = (parts[0], parts[1])
        unknown = next((part for part in (*pair, "".join(pair)) if part not in vocab), None)
        if unknown is not None:
            raise DataError(
                f"{path}:{number}: {unknown!r} is not in {vocab_file}; the two files do not belong "
                "together"
            )
        if pair in lines:
            raise DataError(f"{path}:{number}: {line!r} is on line {lines[pair]} already")
        lines[pair] = number
        merges.append(pair)
    if not merges:
        raise DataError(f"{path}: holds no merges")
    return merges
