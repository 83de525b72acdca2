"""Opening of files in folders that others may write to: pipes, devices and links are refused."""

from __future__ import annotations

import errno
import os
import stat

NOT_REGULAR = "not a regular file"


def open_regular(path: str | os.PathLike[str], flags: int, *, mode: int = 0o640) -> int:
    """Open a regular file as `os.open` does, and return its descriptor.

    A file that is written is not reached through a link, behind which any file of the user may lie.
    A pipe or a device, which may keep its reader waiting for ever, is not waited for.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        descriptor = os.open(
            path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), mode
        )
    except OSError as error:
        if error.errno == errno.ELOOP and writes:
            raise OSError(errno.EINVAL, "is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file. Raises `OSError`."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()
