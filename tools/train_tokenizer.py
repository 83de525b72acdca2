"""Train a byte-level BPE on raw text: `tokenizer.json` for HuggingFaceTokenizer.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.json

Reads the inputs of tools/preprocess_data.py. Exit: 0 done, 2 a wrong flag, 3 wrong data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # allows running without installation

from megatron.config.fields import whole_number  # noqa: E402
from megatron.data.local_file import is_folder, stat_of  # noqa: E402
from megatron.data.preprocess import extract_texts  # noqa: E402
from megatron.data.raw_text import (  # noqa: E402
    UNITS_IN_WORDS,
    RecordBatch,  # noqa: E402
    find_inputs,
    read_batches,
    text_unit,
)
from megatron.data.tokenizer import unencodable  # noqa: E402
from megatron.data.train_bpe import train_byte_level_bpe  # noqa: E402
from megatron.errors import ConfigError, DataError, SparsetronError  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Learn a byte-level BPE from raw text.", allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH")
    parser.add_argument("--output", required=True, type=Path, metavar="tokenizer.json")
    parser.add_argument("--vocab-size", type=whole_number, default=8192, metavar="N")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY")
    parser.add_argument(
        "--text-unit",
        type=text_unit,
        default="paragraph",
        metavar="UNIT",
        help=f"what is a document in plain text: {UNITS_IN_WORDS} (default: paragraph)",
    )
    parser.add_argument(
        "--max-bytes",
        type=whole_number,
        metavar="N",
        help="stop reading after so many bytes of text (default: all)",
    )
    parser.add_argument("--overwrite", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        if arguments.max_bytes is not None and arguments.max_bytes < 1:
            raise ConfigError(f"--max-bytes: {arguments.max_bytes}; wanted at least 1")
        if is_folder(arguments.output):
            raise ConfigError(f"--output: {arguments.output} is a folder; name a file in it")
        if stat_of(arguments.output) is not None and not arguments.overwrite:
            raise ConfigError(f"--output: {arguments.output} exists; add --overwrite")
        files = find_inputs(arguments.input, log=_log)
        keys = tuple(arguments.json_keys)
        batches = read_batches(files, keys=keys, text_unit=arguments.text_unit)
        texts = read_texts(batches, keys, max_bytes=arguments.max_bytes)
        reached = train_byte_level_bpe(
            texts, vocab_size=arguments.vocab_size, output=arguments.output
        )
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if reached < arguments.vocab_size:
        _log(f"--vocab-size: {arguments.vocab_size} asked, the text has pairs for {reached}")
    print(f"wrote {arguments.output}: {reached} entries")
    return 0


def read_texts(
    batches: Iterator[RecordBatch], keys: Sequence[str], *, max_bytes: int | None
) -> Iterator[str]:
    """Yield the texts of all keys in order, until they have `max_bytes` bytes of UTF-8.

    Raises `DataError` with file and line for a bad record.
    """
    left = max_bytes if max_bytes is not None else sys.maxsize
    for batch in batches:
        for number, payload in batch.records:
            try:
                texts = extract_texts(payload, batch.kind, keys)
                sizes = [_bytes(text) for text in texts]
            except DataError as error:
                raise DataError(f"{batch.source}:{number}: {error}") from error
            for text, size in zip(texts, sizes, strict=True):
                yield text
                left -= size
                if left <= 0:
                    return


def _bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8; `DataError` if it has no such form."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise unencodable(text) from error


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
