"""Make the files that the track reads from their public sources, bit by bit.

    git clone https://github.com/chinapedia/wikipedia.abstract.en WIKIPEDIA
    git clone https://github.com/alexwarstadt/blimp BLIMP
    python -m tools.bench.track.make_text WIKIPEDIA BLIMP TEXT

Writes `train-00.jsonl.bz2`, `train-01.jsonl.bz2`, `valid.jsonl.bz2` and `blimp-200.jsonl.bz2` into
TEXT, in a minute. articles.jsonl names the articles of each file in their order, and has
the edits that rules (`clean_page`) leave: characters [start, stop) of the cleaned text and what
stands there instead. A file with another SHA-256 than the track's is refused.
"""

from __future__ import annotations

import argparse
import bz2
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.data.sidecar import write_atomically
from megatron.errors import ConfigError, DataError, SparsetronError
from tools.bench.track.clean_page import clean

ARTICLES = Path(__file__).with_name("articles.jsonl")
WIKIPEDIA_COMMIT = "4f3e897da088cbe89a4f1d4cba3fa2e439c3721b"
BLIMP_COMMIT = "3e56b06fcabca9b30822fc66435fca6b1aa40bb1"
PAIRS = 200
"""Pairs of each paradigm of BLiMP, from its first."""
SHA256 = {
    "train-00.jsonl.bz2": "273230c56bba81b825eee431d69d9b81dbc4630b39a15f3d5dbf97119af7231a",
    "train-01.jsonl.bz2": "9461a81155c822c5dd14017199a25a8878f6ad0e76759725aaba888f29c37bfb",
    "valid.jsonl.bz2": "aa4fecfbffcc25893eabd15aeae5c0ce7e771b1de650af4e13e17bd2bedbdc01",
    "blimp-200.jsonl.bz2": "c1a28c8357435c18c50202aed7135fd932a71d9cf440e9ae2fdd5e816e8b7112",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(description="Make the track's text from its sources.")
    parser.add_argument("wikipedia", type=Path, help="clone of chinapedia/wikipedia.abstract.en")
    parser.add_argument("blimp", type=Path, help="clone of alexwarstadt/blimp")
    parser.add_argument("text", type=Path, help="folder of the files")
    options = parser.parse_args(arguments)
    try:
        files = read_articles(ARTICLES)
        for name, articles in files.items():
            titles = [article["title"] for article in articles]
            pages = read_objects(options.wikipedia, WIKIPEDIA_COMMIT, map(path_of_page, titles))
            write(options.text, name, texts(articles, pages))
        write(options.text, "blimp-200.jsonl.bz2", pairs(options.blimp))
    except SparsetronError as error:
        print(f"make_text: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read_articles(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the articles of each file, whose first one names the file, in their order.

    An article has the key `title`, and `edits` unless the rules are enough for it.
    """
    files: dict[str, list[dict[str, Any]]] = {}
    articles: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        article = json.loads(line)
        if "file" in article:
            articles = files.setdefault(article["file"], [])
        articles.append(article)
    return files


def texts(articles: Sequence[Mapping[str, Any]], pages: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the lines of a file: title and text of each article."""
    for article, page in zip(articles, pages, strict=True):
        text = edited(clean(page, article["title"]), article.get("edits", ()))
        yield {"title": article["title"], "text": text}


def edited(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """Replace the characters [start, stop) of `text`, for each edit in their order."""
    parts: list[str] = []
    begin = 0
    for start, stop, instead in edits:
        parts += [text[begin:start], instead]
        begin = stop
    return "".join([*parts, text[begin:]])


def pairs(blimp: Path) -> Iterator[dict[str, str]]:
    """Yield the first pairs of each paradigm of BLiMP, paradigms by name."""
    listed = _git(blimp, "ls-tree", "--name-only", BLIMP_COMMIT, "data/").decode()
    for text in read_objects(blimp, BLIMP_COMMIT, sorted(listed.split())):
        for line in text.split("\n")[:PAIRS]:
            pair = json.loads(line)
            yield {
                "paradigm": pair["UID"],
                "phenomenon": pair["linguistics_term"],
                "good": pair["sentence_good"],
                "bad": pair["sentence_bad"],
            }


def path_of_page(title: str) -> str:
    """Return where the source has the page of `title`."""
    return f"Page/{title.replace(' ', '_')}.md"


def read_objects(clone: Path, commit: str, paths: Iterable[str]) -> list[str]:
    """Return the files `paths` of `commit`. Raises `DataError` if the clone lacks one."""
    names = [f"{commit}:{path}" for path in paths]
    found = _git(clone, "cat-file", "--batch", stdin="\n".join(names))
    contents: list[str] = []
    begin = 0
    for name in names:
        end = found.index(b"\n", begin)
        head = found[begin:end].rsplit(b" ", 2)
        if head[-1] == b"missing":
            raise DataError(f"{clone}: has no {name}")
        begin = end + 1 + int(head[-1])
        contents.append(found[end + 1 : begin].decode())
        begin += 1  # Git ends each object with a newline of its own.
    return contents


def write(folder: Path, name: str, rows: Iterable[Mapping[str, str]]) -> None:
    """Write `rows` as compressed JSON lines. Raises `DataError` if they are not the track's."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    content = bz2.compress("".join(lines).encode())
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256[name]:
        raise DataError(f"{name}: has the SHA-256 {digest}, must have {SHA256[name]}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror}") from error
    write_atomically(folder / name, content)
    print(f"make_text: {folder / name}: {len(lines):,} lines, {digest}")


def _git(clone: Path, *arguments: str, stdin: str = "") -> bytes:
    """Return the output of git. Raises `ConfigError` if it cannot read the clone."""
    command = ["git", "-C", str(clone), *arguments]
    try:
        done = subprocess.run(command, input=stdin.encode(), capture_output=True, check=True)
    except FileNotFoundError:
        raise ConfigError("git is not installed") from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{clone}: {error.stderr.decode(errors='replace').strip()}") from None
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
