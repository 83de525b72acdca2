"""Make a corpus and a tokenizer from the source code of Python's standard library.

    python tools/stdlib_corpus.py --output data/stdlib

writes `corpus.jsonl` (about 8 MB: source code of the library's modules with docstrings, and the
prose of the language reference that `help()` shows) and `tokenizer.json`, a byte-level BPE trained
on it. A second call with equal flags keeps both files. Exit: 0 done, 2 a wrong flag, 3 the library
is not available as source.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # allows running without installation

from megatron.config.fields import whole_number  # noqa: E402
from megatron.data.local_file import (
    is_file,  # noqa: E402
    is_folder,  # noqa: E402
)
from megatron.data.sidecar import write_atomically  # noqa: E402
from megatron.data.train_bpe import train_byte_level_bpe  # noqa: E402
from megatron.errors import ConfigError, DataError, SparsetronError  # noqa: E402

# Tests and generated tables are repetitive. The others are packaged separately by Linux
# distributions; without them the corpus is the same on more machines.
_SKIP_FOLDERS = frozenset(
    "test tests site-packages dist-packages __pycache__ lib-dynload idlelib lib2to3 turtledemo "
    "ensurepip encodings pydoc_data tkinter distutils msilib __phello__".split()
)
_SKIP_FILES = ("_sysconfigdata", "__phello__", "this.py", "turtle.py", "locale.py", "entities.py")
_TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files of a corpus; `reused` if they existed."""

    text: Path
    tokenizer: Path
    documents: int
    text_bytes: int
    vocab_size: int
    reused: bool


def make_corpus(
    output: Path,
    *,
    vocab_size: int = 4096,
    max_bytes: int = 16_000_000,
    library: Path | None = None,
) -> Corpus:
    """Write `corpus.jsonl` and `tokenizer.json` under `output`, or reuse them.

    `library` is the folder of the modules (default: this interpreter's). The order of documents
    mixes packages and depends only on names, so that the tail that `--split` takes for validation
    resembles the rest. A document with which the text would exceed `max_bytes` is left out.

    Raises:
        ConfigError: `max_bytes` is below 1.
        DataError: The library is not there as source, or `output` cannot be written.
    """
    if max_bytes < 1:
        raise ConfigError(f"--max-bytes: {max_bytes}; wanted at least 1")
    library = library or Path(sysconfig.get_path("stdlib"))
    names, texts, total = [], [], 0
    for name, text in sorted(_documents(library), key=lambda document: _order(document[0])):
        size = len(text.encode())
        if total + size <= max_bytes:
            names.append(name)
            texts.append(text)
            total += size
    if not texts:
        raise DataError(f"{library}: no Python source to make a corpus of; give --library FOLDER")
    corpus, tokenizer, stamp = (
        output / name for name in ("corpus.jsonl", "tokenizer.json", "stdlib.json")
    )
    lines = "".join(
        json.dumps({"name": name, "text": text}) + "\n"
        for name, text in zip(names, texts, strict=True)
    ).encode()
    wanted = {"corpus": hashlib.sha256(lines).hexdigest(), "vocab_size": vocab_size}
    found = _read_stamp(stamp)
    reused = (
        all(found.get(key) == value for key, value in wanted.items())
        and _digest(corpus) == wanted["corpus"]
        and found.get("tokenizer") == _digest(tokenizer) is not None
    )
    reached = found.get("reached", 0)
    if not reused:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{output}: {error.strerror}") from error
        stamp.unlink(missing_ok=True)
        reached = train_byte_level_bpe(texts, vocab_size=vocab_size, output=tokenizer)
        write_atomically(corpus, lines)
        made = {**wanted, "reached": reached, "tokenizer": _digest(tokenizer)}
        write_atomically(stamp, (json.dumps(made, indent=2) + "\n").encode())
    return Corpus(
        text=corpus,
        tokenizer=tokenizer,
        documents=len(texts),
        text_bytes=total,
        vocab_size=reached,
        reused=reused,
    )


def _documents(library: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each module, and of each topic of the language reference."""
    if not is_folder(library):
        raise DataError(f"{library}: is no folder; give --library FOLDER")
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        if _SKIP_FOLDERS.intersection(relative.parts[:-1]):
            continue
        if path.name.startswith(_SKIP_FILES):
            continue
        text = _read(path)
        if text.strip():
            yield relative.as_posix(), text
    yield from _topics(library / _TOPICS)


def _read(path: Path) -> str:
    """Return a module's source; "" if it is not UTF-8, which is deliberate, or has a zero byte."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return "" if "\0" in text else text.replace("\r\n", "\n")


def _topics(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the strings of one dict literal, without running the file; it may be absent."""
    if not path.is_file():
        return
    for node in ast.parse(_read(path)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                yield f"topic {name}", str(text)


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if is_file(path) else None


def _read_stamp(path: Path) -> dict:
    try:
        stamp = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Make a corpus and a vocabulary from Python's standard library.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--vocab-size", type=whole_number, default=4096, metavar="N")
    parser.add_argument("--max-bytes", type=whole_number, default=16_000_000, metavar="N")
    parser.add_argument("--library", type=Path, metavar="FOLDER", help="default: this Python's")
    arguments = parser.parse_args(argv)
    try:
        made = make_corpus(
            arguments.output,
            vocab_size=arguments.vocab_size,
            max_bytes=arguments.max_bytes,
            library=arguments.library,
        )
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"{'kept' if made.reused else 'wrote'} {made.text}: {made.documents} documents, "
        f"{made.text_bytes / 1e6:.1f} MB; {made.tokenizer}: {made.vocab_size} entries"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
