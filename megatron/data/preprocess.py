"""Tokenization of raw text into `.bin`/`.idx` pairs, in worker processes."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import queue
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path, optimal_dtype
from megatron.data.local_file import is_folder, stat_of
from megatron.data.raw_text import MAX_DOCUMENT_BYTES, Oversized, Payload, RecordBatch
from megatron.data.sidecar import sidecar_path
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import ConfigError, DataError, SparsetronError


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """Arguments of `build_tokenizer` from the user's flags, small enough to send to a worker."""

    type: str
    vocab_file: str | None = None
    merge_file: str | None = None
    model: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """The settings of encoding: the keys of a record, the tokenizer, and whether to add an end."""

    keys: tuple[str, ...]
    tokenizer: TokenizerChoice
    append_eod: bool


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The documents of a batch, an array and a list of lengths per key, and bad records."""

    tokens: list[NDArray]
    lengths: list[list[int]]  # 0 = an empty document
    bad: list[tuple[int, str]]  # line or row number, reason
    text_bytes: int


def encode(batch: RecordBatch, options: EncodeOptions) -> Encoded:
    """Return the tokens of a batch; a record with one bad key is left out under every key."""
    tokenizer = load_tokenizer(options.tokenizer)
    dtype = optimal_dtype(tokenizer.vocab_size)
    ids: list[list[NDArray]] = [[] for _ in options.keys]
    bad: list[tuple[int, str]] = []
    text_bytes = 0
    for number, payload in batch.records:
        try:
            texts = extract_texts(payload, batch.kind, options.keys)
            found = [tokenizer.encode(text) for text in texts]
        except DataError as error:
            bad.append((number, str(error)))
            continue
        text_bytes += len(payload) if isinstance(payload, bytes) else sum(map(len, texts))
        for key, document in enumerate(found):
            if document and options.append_eod:
                document.append(tokenizer.eod)
            ids[key].append(np.array(document, dtype=dtype))
    return Encoded(
        tokens=[np.concatenate([np.empty(0, dtype), *part]) for part in ids],
        lengths=[[len(document) for document in part] for part in ids],
        bad=bad,
        text_bytes=text_bytes,
    )


@functools.cache
def load_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Return the tokenizer of a choice, built once per process (each batch carries the choice)."""
    return build_tokenizer(
        choice.type,
        vocab_file=choice.vocab_file,
        merge_file=choice.merge_file,
        model=choice.model,
        vocab_size=choice.vocab_size,
        hub=True,
    )


def extract_texts(payload: Payload, kind: str, keys: Sequence[str]) -> list[str]:
    """Return the text under each key of a record; DataError with the reason if one is missing."""
    if isinstance(payload, Oversized):
        raise DataError(
            f"{payload.size} bytes or more; a document may have {MAX_DOCUMENT_BYTES} (of a plain "
            "text file, --text-unit paragraph or line makes smaller ones)"
        )
    if isinstance(payload, tuple):
        values = dict(zip(keys, payload, strict=True))
    else:
        if b"\0" in payload:
            raise DataError("NUL byte; not text")
        try:
            text = payload.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8 at byte {error.start + 1}") from error
        values = {keys[0]: text} if kind == "text" else _parse(text)
    texts: list[str] = []
    for key in keys:
        if key not in values:
            raise DataError(_missing(key, values))
        value = values[key]
        if not isinstance(value, str):
            shown = "null" if value is None else type(value).__name__
            raise DataError(f"{key!r} is {shown}; wanted a string")
        if "\0" in value:
            raise DataError(f"{key!r} has a NUL character; not text")
        texts.append(value)
    return texts


def _missing(key: str, values: Mapping[str, object]) -> str:
    texts = [other for other, value in values.items() if isinstance(value, str)]
    hint = f"; give --json-keys {texts[0]}" if len(texts) == 1 else ""
    return f"no key {key!r}; it has {', '.join(map(repr, values)) or 'none'}{hint}"


def _parse(line: str) -> dict[str, object]:
    try:
        # Each of the files that were joined to one may begin with a BOM.
        value = json.loads(line.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        array = "; a JSON array over several lines? write its objects one a line"
        hint = array if line.strip() in ("[", "[{") else ""
        raise DataError(f"not JSON: {what} at column {error.colno}{hint}") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"a JSON {kind}; wanted one object a line, {{...}}")
    return value


Task = TypeVar("Task")
Result = TypeVar("Result")

_AHEAD = 3
"""Maximum tasks per worker: one running, one waiting, one done but not fetched."""


class WorkerError(Exception):
    """A task failed with an unexpected error, or its worker died; the message is one line."""

    def __init__(self, task: object, reason: str, *, died: bool) -> None:
        super().__init__(reason)
        self.task = task
        self.reason = reason
        self.died = died


class Crew(Generic[Task, Result]):
    """A pool of `size` spawned workers, each started with its first task; a context manager.

    `work` and the tasks must be picklable. Leaving the context ends every worker at once. If this
    process dies, its workers end after the current task.
    """

    def __init__(self, work: Callable[[Task], Result], *, size: int) -> None:
        assert size >= 1, size
        self._work = work
        self._size = size
        self._workers: list[tuple[SpawnProcess, Connection]] = []

    def __enter__(self) -> Crew[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._workers:
            connection.close()
            process.terminate()
        for process, _connection in self._workers:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._workers.clear()

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Yield tasks with their results, in order; a few tasks per worker are read ahead.

        A SparsetronError of `work` is raised as it is, any other error as a WorkerError.
        """
        waiting: deque[tuple[int, Task]] = deque()
        for number, task in enumerate(tasks):
            if len(waiting) == self._size * _AHEAD:
                yield self._receive(*waiting.popleft())
            self._send(number, task)
            waiting.append((number, task))
        while waiting:
            yield self._receive(*waiting.popleft())

    def _send(self, number: int, task: Task) -> None:
        try:
            if len(self._workers) < self._size:
                self._start()
            self._workers[number % self._size][1].send(task)
        except OSError as error:
            raise WorkerError(task, "a worker process died", died=True) from error

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        try:
            process.start()
        finally:
            theirs.close()  # otherwise the end of the worker would not close the pipe
        self._workers.append((process, ours))

    def _receive(self, number: int, task: Task) -> tuple[Task, Result]:
        try:
            error, result = self._workers[number % self._size][1].recv()
        except (EOFError, OSError) as gone:
            raise WorkerError(task, "a worker process died", died=True) from gone
        if isinstance(error, SparsetronError):
            raise error
        if error is not None:
            raise WorkerError(task, error, died=False)
        return task, result


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """Run a worker: tasks until the pipe ends, each answered by (error or None, result)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end = object()

    def receive() -> None:
        # Separate from the work, so that the parent never waits to send while this worker waits to
        # answer.
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    tasks.put(connection.recv())
        finally:
            tasks.put(end)

    threading.Thread(target=receive, daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while (task := tasks.get()) is not end:
            connection.send(_answer(work, task))


def _answer(work: Callable[[Any], Any], task: Any) -> tuple[SparsetronError | str | None, Any]:
    try:
        return None, work(task)
    except SparsetronError as error:
        return error, None
    except Exception as error:
        return describe_error(error), None


def describe_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


@dataclass(kw_only=True)
class PreprocessCounts:
    """The progress of a preprocessing run."""

    documents: int = 0
    empty: int = 0  # documents without a token, of the first key
    tokens: int = 0
    text_bytes: int = 0
    bad: int = 0
    position: int = 0  # of the input, see `RecordBatch.position`


@dataclass(frozen=True, kw_only=True)
class PreprocessResult:
    """A finished run: the prefixes written, one per key, and their total contents."""

    prefixes: tuple[str, ...]
    dtype: np.dtype
    counts: PreprocessCounts


def preprocess(
    batches: Iterable[RecordBatch],
    *,
    options: EncodeOptions,
    output_prefix: str,
    workers: int,
    max_bad_lines: int = 0,
    log: Callable[[str], None],
    watch: Callable[[PreprocessCounts], None],
) -> PreprocessResult:
    """Write `{output_prefix}_{key}_document.{bin,idx,json}` for each key.

    The files get their names when those of all keys are on disk. `watch` is called after each
    batch, `log` with a line for each record left out. Raises `DataError` for more than
    `max_bad_lines` bad records, for a worker that fails, and for a key without any token.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    dtype = optimal_dtype(tokenizer.vocab_size)
    prefixes = output_prefixes(output_prefix, options.keys)
    counts = PreprocessCounts()
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in prefixes]
        results = stack.enter_context(closing(_encoded(batches, options, workers=workers)))
        tokens = [0] * len(writers)
        for batch, encoded in results:
            _report_bad(batch, encoded.bad, counts, allowed=max_bad_lines, log=log)
            for key, writer in enumerate(writers):
                _write(writer, encoded.tokens[key], encoded.lengths[key])
                tokens[key] += len(encoded.tokens[key])
            counts.documents += len(encoded.lengths[0])
            counts.empty += encoded.lengths[0].count(0)
            counts.text_bytes += encoded.text_bytes
            counts.tokens = sum(tokens)
            counts.position = batch.position
            watch(counts)
        if not counts.documents:
            bad = f" but {counts.bad} bad lines" if counts.bad else ""
            raise DataError(f"--input: holds no documents{bad}; nothing was written")
        for key, total in zip(options.keys, tokens, strict=True):
            if total == 0:
                raise DataError(
                    f"--input: {counts.documents} documents, but no text under {key!r}; nothing "
                    "was written"
                )
        for writer in writers:
            writer.finish()
        for writer in writers:
            writer.close(tokenizer=tokenizer.describe())
    return PreprocessResult(prefixes=prefixes, dtype=dtype, counts=counts)


def output_prefixes(output_prefix: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the prefix of each JSON key's pair, named as in Megatron.

    Raises `ConfigError` for a key that is unfit for a file name or given twice.
    """
    for key in keys:
        if not re.fullmatch(r"[\w.-]+", key):
            raise ConfigError(f"--json-keys: {key!r}; a key names a file: letters, digits, . _ -")
    if len(set(keys)) != len(keys):
        raise ConfigError(f"--json-keys: {' '.join(keys)}: a key is given twice")
    return tuple(f"{output_prefix}_{key}_document" for key in keys)


def check_outputs(prefixes: Iterable[str], *, inputs: Iterable[Path], overwrite: bool) -> None:
    """Create the output folder and remove temporary files of a killed run.

    Raises `ConfigError` if an output exists and may not be overwritten, is a folder, or is one of
    the inputs, and `DataError` if the folder cannot be made.
    """
    sources = {os.path.realpath(path) for path in inputs}
    for prefix in prefixes:
        outputs = (bin_path(prefix), idx_path(prefix), sidecar_path(prefix))
        for path in outputs:
            if os.path.realpath(path) in sources:
                raise ConfigError(f"--output-prefix: {path} is one of the inputs; choose another")
            if is_folder(path):
                raise ConfigError(f"--output-prefix: {path} is a folder; choose another")
            if stat_of(path) is not None and not overwrite:
                raise ConfigError(
                    f"--output-prefix: {path} exists; choose another or add --overwrite"
                )
        try:
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{bin_path(prefix).parent}: {error.strerror}") from error
        for path in outputs:
            _remove_stale(path)


def _remove_stale(path: Path) -> None:
    """Remove temporary files of `path` whose process has ended."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)\.tmp")
    for other in path.parent.iterdir():
        match = pattern.fullmatch(other.name)
        if match and not _is_running(int(match[1])):
            other.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _report_bad(
    batch: RecordBatch,
    bad: Sequence[tuple[int, str]],
    counts: PreprocessCounts,
    *,
    allowed: int,
    log: Callable[[str], None],
) -> None:
    for number, reason in bad:
        counts.bad += 1
        place = f"{batch.source}:{number}"
        if counts.bad > allowed:
            raise DataError(
                f"{place}: {reason}; that is bad line {counts.bad}, and --max-bad-lines allows "
                f"{allowed}"
            )
        log(f"left out {place}: {reason}")


def _write(writer: IndexedDatasetWriter, tokens: NDArray, lengths: Sequence[int]) -> None:
    start = 0
    for length in lengths:
        writer.add_document(tokens[start : start + length])
        start += length


def _encoded(
    batches: Iterable[RecordBatch], options: EncodeOptions, *, workers: int
) -> Generator[tuple[RecordBatch, Encoded], None, None]:
    """Yield batches with their tokens, in order, from this process or from workers."""
    work = functools.partial(encode, options=options)
    try:
        if workers > 1:
            with Crew(work, size=workers) as crew:
                yield from crew.map(batches)
            return
        for batch in batches:
            yield batch, _here(work, batch)
    except WorkerError as error:
        assert isinstance(error.task, RecordBatch)
        numbers = f"{error.task.records[0][0]}-{error.task.records[-1][0]}"
        place = f"{error.task.source}:{numbers}"
        if error.died:
            raise DataError(
                f"{place}: {error.reason} near here (killed for memory?); lower --workers"
            ) from error
        raise DataError(f"{place}: the tokenizer failed: {error.reason}") from error


def _here(work: Callable[[RecordBatch], Encoded], batch: RecordBatch) -> Encoded:
    try:
        return work(batch)
    except SparsetronError:
        raise
    except Exception as error:
        raise WorkerError(batch, describe_error(error), died=False) from error
