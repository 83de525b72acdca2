"""Made-up sentence pairs and the files that are made of them."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

from megatron.data.preprocess_pairs import PairPaths
from tools.preprocess_pairs import main as preprocess

ENGLISH = ("the", "dog", "cat", "sees", "a", "house", "Tom", "green", "and", "sleeps", "never")
GERMAN = ("der", "Hund", "Katze", "sieht", "ein", "Haus", "Tom", "grünes", "und", "schläft", "nie")


def made_up_pairs(count: int, *, seed: int = 0, longest: int = 9) -> list[tuple[str, str]]:
    """Return English sentences with a word for word translation."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        words = [draw.randrange(len(ENGLISH)) for _ in range(draw.randint(1, longest))]
        english, german = (" ".join(side[word] for word in words) for side in (ENGLISH, GERMAN))
        pairs.append((f"{english}.", f"{german}!"))
    return pairs


def write_archive(path: Path, pairs: list[tuple[str, str]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("deu.txt", "".join(f"{en}\t{de}\n" for en, de in pairs))
        archive.writestr("_about.txt", "About.\n")
    return path


def write_data(folder: Path, *, pairs: int = 300, longest: int = 9, merges: int = 40) -> PairPaths:
    """Write data of German to English, of a dictionary of some 50 entries each."""
    archive = write_archive(folder / "pairs.zip", made_up_pairs(pairs, longest=longest))
    prefix = str(folder / "data" / "de-en")
    flags = ["--source-lang", "de", "--target-lang", "en", "--output-prefix", prefix]
    more = ["--merges", str(merges), "--split", "80,10,10"]
    assert preprocess(["--tatoeba", str(archive), *flags, *more]) == 0
    return PairPaths(prefix, "de", "en")
