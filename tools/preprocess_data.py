"""Convert raw text into the token files that training reads: `.bin`, `.idx` and `.json`.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \\
        --append-eod

Flags are Megatron-LM's. The output files appear only when all are complete. Exit: 0 done, 2 a wrong
flag, 3 wrong data. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # allows running without installation

from megatron.config.fields import whole_number  # noqa: E402
from megatron.data.local_file import require_regular  # noqa: E402
from megatron.data.preprocess import (  # noqa: E402  # noqa: E402
    EncodeOptions,
    PreprocessCounts,
    PreprocessResult,
    TokenizerChoice,
    check_outputs,
    load_tokenizer,
    output_prefixes,
    preprocess,
)
from megatron.data.raw_text import (  # noqa: E402
    UNITS_IN_WORDS,
    find_inputs,
    format_of,
    read_batches,
    read_dataset,  # noqa: E402
    text_unit,
)
from megatron.data.raw_tokens import TOKEN_DTYPES, convert_tokens  # noqa: E402
from megatron.data.tokenizer import TOKENIZER_TYPES, Tokenizer  # noqa: E402
from megatron.errors import ConfigError, SparsetronError  # noqa: E402

MOST_WORKERS = 1024
"""Maximum number of processes: more than any node has cores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    arguments = parse(argv)
    try:
        run(arguments)
    except SparsetronError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags; argparse exits with code 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        description="Turn raw text into the token files that training reads.", allow_abbrev=False
    )
    source = parser.add_argument_group("input")
    source.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files, folders or globs: JSON lines (an object a line), Parquet, or plain text, by "
        "the suffix or the content; .gz, .bz2, .xz and .zst are unpacked on the way",
    )
    source.add_argument("--dataset", metavar="NAME", help="a data set of the `datasets` package")
    source.add_argument("--dataset-split", default="train", help="its split (default: train)")
    source.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="fields of an object, or columns, each of which makes an output (default: text)",
    )
    source.add_argument(
        "--text-unit",
        type=text_unit,
        default="file",
        metavar="UNIT",
        help=f"what is a document in plain text: {UNITS_IN_WORDS} (default: file)",
    )
    source.add_argument(
        "--token-dtype",
        choices=TOKEN_DTYPES,
        help="the files of --input are flat arrays of token ids of this type, as nanoGPT and llm.c "
        "write them; documents end with the tokenizer's mark",
    )
    source.add_argument(
        "--max-bad-lines",
        type=whole_number,
        default=0,
        metavar="N",
        help="leave out up to N lines that are no text, naming each (default 0: stop at the first)",
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer-type", required=True, help=", ".join(TOKENIZER_TYPES))
    tokenizer.add_argument(
        "--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json or encoder.json"
    )
    tokenizer.add_argument(
        "--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt or vocab.bpe"
    )
    tokenizer.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="SentencePiece .model; tokenizer.json, a folder or a hub name for HuggingFace",
    )
    tokenizer.add_argument(
        "--vocab-size", type=whole_number, metavar="N", help="NullTokenizer: its ids"
    )
    tokenizer.add_argument("--append-eod", action="store_true", help="end documents with a mark")
    output = parser.add_argument_group("output and running")
    output.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.*"
    )
    output.add_argument("--overwrite", action="store_true", help="replace an existing output")
    output.add_argument(
        "--workers",
        type=whole_number,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        metavar="N",
        help="processes that tokenize (default: %(default)s, the cores here)",
    )
    output.add_argument("--log-interval", type=whole_number, default=10000, metavar="DOCUMENTS")
    output.add_argument(
        "--partitions", type=whole_number, default=1, help="accepted; not needed here"
    )
    output.add_argument("--keep-sequential-samples", action="store_true", help="always so here")
    output.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> PreprocessResult:
    """Check the flags against each other and the disk, then write the token files.

    Raises:
        ConfigError: Flags conflict, or an output exists.
        DataError: An input is missing or damaged.
    """
    _check(arguments)
    keys = tuple(arguments.json_keys or ("text",))
    choice = TokenizerChoice(
        type=arguments.tokenizer_type,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        model=arguments.tokenizer_model,
        vocab_size=arguments.vocab_size,
    )
    tokenizer = load_tokenizer(choice)
    vocab_size = tokenizer.vocab_size
    if getattr(tokenizer, "drops_characters", False):
        _log(
            f"warning: {arguments.tokenizer_model}: has neither an unknown token nor bytes to fall "
            "back to: characters outside its vocabulary are dropped"
        )
    if arguments.token_dtype:
        return _convert(arguments, tokenizer)
    files = find_inputs(arguments.input or [], log=_log)
    if arguments.json_keys and files and all(format_of(path) == "text" for path in files):
        raise ConfigError("--json-keys: the input is plain text, which has no keys; leave it out")
    prefixes = output_prefixes(arguments.output_prefix, keys)
    check_outputs(prefixes, inputs=files, overwrite=arguments.overwrite)
    if arguments.dataset:
        batches = read_dataset(arguments.dataset, split=arguments.dataset_split, keys=keys)
    else:
        batches = read_batches(files, keys=keys, text_unit=arguments.text_unit)
    with ProgressLine(
        total=sum(path.stat().st_size for path in files), interval=arguments.log_interval
    ) as progress:
        outcome = preprocess(
            batches,
            options=EncodeOptions(keys=keys, tokenizer=choice, append_eod=arguments.append_eod),
            output_prefix=arguments.output_prefix,
            workers=arguments.workers,
            max_bad_lines=arguments.max_bad_lines,
            log=progress.log,
            watch=progress.watch,
        )
    counts = outcome.counts
    _log(progress.line(counts))
    if counts.empty:
        _log(f"{counts.empty} of {counts.documents} documents have no token")
    if counts.documents > 1 and not arguments.append_eod:
        _log(
            "documents end without a mark, so that training does not see where one begins; "
            "--append-eod writes marks"
        )
    return _told(outcome, vocab_size)


def _convert(arguments: argparse.Namespace, tokenizer: Tokenizer) -> PreprocessResult:
    """Write the tokens of flat files; see `run`."""
    for flag, given in (
        ("--dataset", arguments.dataset),
        ("--json-keys", arguments.json_keys),
        ("--append-eod", arguments.append_eod),
    ):
        if given:
            raise ConfigError(f"{flag}: given, but --token-dtype reads ids as they are")
    files = [Path(name) for name in arguments.input]
    for path in files:
        require_regular(path)
    prefixes = output_prefixes(arguments.output_prefix, ("text",))
    check_outputs(prefixes, inputs=files, overwrite=arguments.overwrite)
    with ProgressLine(
        total=sum(path.stat().st_size for path in files), interval=arguments.log_interval
    ) as progress:
        outcome = convert_tokens(
            files,
            dtype=arguments.token_dtype,
            tokenizer=tokenizer,
            prefix=prefixes[0],
            watch=progress.watch,
        )
    return _told(outcome, tokenizer.vocab_size)


def _told(outcome: PreprocessResult, vocab_size: int) -> PreprocessResult:
    """Print what was written."""
    counts = outcome.counts
    for prefix in outcome.prefixes:
        print(
            f"wrote {prefix}.bin and .idx: {counts.documents} documents, {outcome.dtype} tokens, "
            f"vocabulary {vocab_size}"
        )
    print(f"{counts.tokens} tokens in all; pass with --data-path {' '.join(outcome.prefixes)}")
    return outcome


class ProgressLine:
    """Progress on stderr: a bar on a terminal, else a line every `interval` documents.

    Inside the context, Ctrl-C and SIGTERM end the run after the current batch (a second one at
    once): an exception while a worker starts would leave the worker half started.
    """

    def __init__(self, *, total: int, interval: int) -> None:
        self._start = time.monotonic()
        self._interval = interval
        self._next = interval
        self._bar = _bar(total) if total and sys.stderr.isatty() else None
        self._signal = 0

    def __enter__(self) -> ProgressLine:
        self._handlers = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._bar is not None:
            self._bar.close()

    def log(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        _log(line)

    def _stop(self, number: int, _: object) -> None:
        if self._signal:
            raise SystemExit(128 + number)
        self._signal = number

    def watch(self, counts: PreprocessCounts) -> None:
        """Show the progress. Raises `SystemExit` if a signal arrived."""
        if self._signal:
            self.log("interrupted; nothing was written")
            raise SystemExit(128 + self._signal)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{counts.documents} documents", refresh=False)
            self._bar.update(counts.position - self._bar.n)
        elif counts.documents >= self._next:
            _log(self.line(counts))
            self._next = counts.documents - counts.documents % self._interval + self._interval

    def line(self, counts: PreprocessCounts) -> str:
        """Return a line with documents, tokens and MB of text, and their rates since the start."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        megabytes = counts.text_bytes / 1e6
        return (
            f"{counts.documents} documents, {counts.tokens} tokens, {megabytes:.1f} MB in "
            f"{seconds:.1f} s ({counts.documents / seconds:.0f} documents/s, "
            f"{megabytes / seconds:.2f} MB/s)"
        )


def _bar(total: int):
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr)


def _check(arguments: argparse.Namespace) -> None:
    if bool(arguments.input) == bool(arguments.dataset):
        raise ConfigError("--input: give either --input or --dataset, one of the two")
    for name, least in (("workers", 1), ("log_interval", 1), ("partitions", 1)):
        if getattr(arguments, name) < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: {getattr(arguments, name)}; wanted at least {least}")
    if arguments.workers > MOST_WORKERS:
        raise ConfigError(f"--workers: {arguments.workers}; must be at most {MOST_WORKERS}")
    if arguments.max_bad_lines < 0:
        raise ConfigError(f"--max-bad-lines: {arguments.max_bad_lines}; wanted at least 0")
    if not os.path.basename(arguments.output_prefix):
        raise ConfigError(f"--output-prefix: {arguments.output_prefix!r} ends in no name")
    if arguments.partitions > 1:
        _log(f"--partitions {arguments.partitions}: ignored; --workers spreads one pass instead")
    if arguments.keep_sequential_samples:
        _log("--keep-sequential-samples: always so; documents keep the order of the input")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
