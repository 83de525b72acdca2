"""Convert sentence pairs to the files that pretrain_translation.py reads.

    python tools/preprocess_pairs.py --tatoeba deu-eng.zip --source-lang de --target-lang en \\
        --output-prefix data/de-en
    python tools/preprocess_pairs.py --source-file train.de --target-file train.en \\
        --source-lang de --target-lang en --output-prefix data/de-en

Pairs are shuffled and split by the sentences of one language (--split-by), so that no sentence of
that language is in two splits, whatever its case and Unicode form. A joint BPE of both languages
and a dictionary of each are learned from the training pairs; text is lowercased. Exit: 0 done, 2 a
flag is wrong, 3 the data is. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.fields import split_shares, whole_number  # noqa: E402
from megatron.data.preprocess_pairs import PairCounts, PairPaths, preprocess_pairs  # noqa: E402
from megatron.data.raw_pairs import RawPairs, read_tatoeba, read_two_files  # noqa: E402
from megatron.errors import ConfigError, SparsetronError  # noqa: E402

LARGEST_SEED = 2**32 - 1
LONGEST = 1 << 20
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,15}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parse(argv)
    try:
        run(options)
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags; argparse exits with code 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="preprocess_pairs.py",
        description="Turn sentence pairs into the files that training reads.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--tatoeba", type=Path, metavar="ZIP", help="archive of tab-delimited pairs, English first")
    add("--source-file", type=Path, metavar="FILE", help="plain text, a sentence a line")
    add("--target-file", type=Path, metavar="FILE", help="its translation, line by line")
    add("--source-lang", required=True, metavar="LANG", help="language code, as in de")
    add("--target-lang", required=True, metavar="LANG", help="language code, as in en")
    add("--output-prefix", required=True, metavar="PREFIX", help="the path all names begin with")
    add(
        "--merges",
        type=whole_number,
        default=10_000,
        metavar="N",
        help="merges of the joint BPE (10000)",
    )
    add(
        "--longest",
        type=whole_number,
        default=250,
        metavar="N",
        help="leave out pairs of which a sentence has more tokens, its end included (250)",
    )
    add(
        "--split",
        default="960,20,20",
        metavar="A,B,C",
        help="shares of train, valid and test, counted in sentences of --split-by (960,20,20)",
    )
    add(
        "--split-by",
        metavar="LANG",
        help="language whose sentences are in one split each (default: en if it is one of the "
        "two, else the target)",
    )
    add("--seed", type=whole_number, default=1234, metavar="N", help="seed of the split (1234)")
    add(
        "--overwrite",
        action="store_true",
        help="replace an existing output when the new one is complete",
    )
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> PairCounts:
    """Check the flags, write the files and print a summary.

    Raises:
        ConfigError: Flags are wrong, or an output exists.
        DataError: An input is missing or damaged.
    """
    _check(options)
    shares = split_shares(options.split)
    found = _read(options)
    paths = PairPaths(options.output_prefix, options.source_lang, options.target_lang)
    counts = preprocess_pairs(
        found.pairs,
        paths,
        merges=options.merges,
        longest=options.longest,
        shares=shares,
        seed=options.seed,
        split_by=options.split_by,
        overwrite=options.overwrite,
    )
    if found.empty:
        print(f"left out {found.empty} pairs with an empty side")
    if counts.too_long:
        print(f"left out {counts.too_long} pairs of more than {options.longest} tokens")
    if counts.merges < options.merges:
        print(f"the text gave {counts.merges} merges, not {options.merges}")
    sizes = ", ".join(f"{name} {count}" for name, count in counts.pairs.items())
    entries = ", ".join(
        f"{language} {count}"
        for language, count in zip(paths.languages, counts.entries, strict=True)
    )
    print(f"wrote {options.output_prefix}.*: pairs: {sizes}; dictionaries: {entries}")
    print(
        f"pass with --data-path {options.output_prefix} --source-lang {options.source_lang} "
        f"--target-lang {options.target_lang}"
    )
    return counts


def _read(options: argparse.Namespace) -> RawPairs:
    if options.tatoeba is not None:
        return read_tatoeba(
            options.tatoeba, source_lang=options.source_lang, target_lang=options.target_lang
        )
    return read_two_files(options.source_file, options.target_file)


def _check(options: argparse.Namespace) -> None:
    files = (options.source_file, options.target_file)
    if (options.tatoeba is None) == (files == (None, None)) or files.count(None) == 1:
        raise ConfigError(
            "--tatoeba: give either --tatoeba, or both --source-file and --target-file"
        )
    languages = (options.source_lang, options.target_lang)
    for flag, language in zip(("--source-lang", "--target-lang"), languages, strict=True):
        if not _LANGUAGE.fullmatch(language):
            raise ConfigError(f"{flag}: {language!r}; must be a language code such as de")
    if languages[0] == languages[1]:
        raise ConfigError(f"--target-lang: {languages[1]} is the source too; give another")
    if options.split_by is None:
        options.split_by = "en" if "en" in languages else languages[1]
    if options.split_by not in languages:
        raise ConfigError(f"--split-by: {options.split_by!r}; must be one of {languages}")
    for flag, value, low, high in (
        ("--longest", options.longest, 2, LONGEST),
        ("--seed", options.seed, 0, LARGEST_SEED),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{flag}: {value}; must be from {low} to {high}")
    if not os.path.basename(options.output_prefix):
        raise ConfigError(f"--output-prefix: {options.output_prefix!r} ends in no name")


if __name__ == "__main__":
    sys.exit(main())
