"""The system calls of checkpoints, in one table, and what is built from them.

Every call that reads or changes the disk goes through one `Files`, so that a test can make any of
them fail, or be the last one before a crash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.checkpoint.manifest import FileRecord
from megatron.errors import CheckpointError

CHUNK = 8 * 2**20
"""Bytes per read and write: large enough for the disk, small beside any tensor."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Files:
    """One method per system call; a subclass may fail at will."""

    def open(self, path: Path, flags: int, mode: int = 0o640) -> int:
        """Descriptor of a file or folder."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def read(self, descriptor: int, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        return os.read(descriptor, size)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Number of bytes written, perhaps not all."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Wait until the disk has it."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Give the descriptor back; network disks report late write errors here."""
        os.close(descriptor)

    def status(self, descriptor: int) -> os.stat_result:
        """Kind and size of what is open."""
        return os.fstat(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename at once or not at all; a file at `target` is replaced, a full folder is not."""
        os.rename(source, target)

    def mkdir(self, path: Path, mode: int = 0o750) -> None:
        """Make one folder."""
        os.mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def unlink(self, path: Path) -> None:
        """Remove a file or link."""
        os.unlink(path)

    def entries(self, path: Path) -> list[str]:
        """Sorted names in a folder."""
        return sorted(os.listdir(path))

    def free(self, path: Path) -> int:
        """Bytes that may still be written to the disk of `path`."""
        return shutil.disk_usage(path).free


FILES = Files()


@contextlib.contextmanager
def failing_as(path: Path, doing: str, *, need: int | None = None) -> Iterator[None]:
    """Turn `OSError` into a one-line `CheckpointError` naming the path; without space left it also
    tells the bytes that were needed and those there are."""
    try:
        yield
    except OSError as error:
        text = f"{path}: cannot {doing}: {os.strerror(error.errno) if error.errno else error}"
        if error.errno in _NO_SPACE and need is not None:
            with contextlib.suppress(OSError):
                text += f"; need {need} bytes, have {FILES.free(path.parent)}"
            text += "; free some space, then save again"
        raise CheckpointError(text) from error


def write_file(files: Files, path: Path, chunks: Iterable[memoryview], need: int) -> FileRecord:
    """Create a file from `chunks`, hashed on their way, and wait until the disk has it.

    `need`: bytes that will come, for the error when space runs out. A file that is there already
    is an error. Raises `CheckpointError`.
    """
    digest = hashlib.sha256()
    size = 0
    with failing_as(path, "write", need=need):
        descriptor = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for chunk in chunks:
                for start in range(0, len(chunk), CHUNK):
                    piece = chunk[start : start + CHUNK]
                    digest.update(piece)
                    size += len(piece)
                    while piece:
                        piece = piece[files.write(descriptor, piece) :]
            files.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                files.close(descriptor)
            raise
        files.close(descriptor)
    return FileRecord(size, digest.hexdigest())


def sync_folder(files: Files, path: Path) -> None:
    """Wait until the disk has the names in a folder. Raises `CheckpointError`."""
    with failing_as(path, "sync"):
        descriptor = files.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            files.fsync(descriptor)
        except OSError as error:
            # Some network disks have no such call for folders, and nothing to wait for.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            files.close(descriptor)


def make_folder(files: Files, path: Path) -> None:
    """Make a folder with all above it that are missing, each one on disk when this returns."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with failing_as(folder, "make the folder"):
            with contextlib.suppress(FileExistsError):
                files.mkdir(folder)
        sync_folder(files, folder.parent)


def remove_folder(files: Files, path: Path) -> None:
    """Remove a folder and all in it; links in it are removed, not followed."""
    for name in files.entries(path):
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            remove_folder(files, entry)
        else:
            files.unlink(entry)
    files.rmdir(path)


def replace_text(files: Files, path: Path, content: str, nonce: str) -> None:
    """Write a small text file so that a reader sees the old content or the new, never a part."""
    data = memoryview(content.encode())
    draft = path.with_name(f"{path.name}.tmp-{nonce}")
    try:
        write_file(files, draft, [data], len(data))
        with failing_as(path, "write"):
            files.rename(draft, path)
    except CheckpointError:
        with contextlib.suppress(OSError):
            files.unlink(draft)
        raise
    sync_folder(files, path.parent)


@contextlib.contextmanager
def opened(files: Files, path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size in bytes of a regular file, open for reading. Raises `CheckpointError`,
    for links, folders, pipes and devices too."""
    with failing_as(path, "read"):
        try:
            # Without O_NONBLOCK a pipe under that name would be waited for.
            descriptor = files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CheckpointError(
                    f"{path}: is a link; a checkpoint holds plain files"
                ) from error
            raise
        try:
            status = files.status(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: is not a plain file")
            yield descriptor, status.st_size
        finally:
            files.close(descriptor)


def read_bytes(files: Files, descriptor: int, size: int) -> bytes:
    """The next `size` bytes, fewer only at the end of the file."""
    pieces = []
    while size > 0 and (piece := files.read(descriptor, min(size, CHUNK))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
