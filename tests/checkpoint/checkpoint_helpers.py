"""Ranks as threads, and file operations that fail or die at a chosen system call."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import MANIFEST_NAME, sign
from megatron.checkpoint.io import Files
from tests.limits import LIMIT


class PeerGone(Exception):
    """The error of a collective in which another rank is gone."""


class CheckpointRanks:
    """Threads that run one function as several ranks, with a gather among them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ready = threading.Condition()
        self._texts: list[dict[int, str]] = []
        self._rounds = [0] * world
        self._gone = False

    def gather(self, rank: int) -> Callable[[str], list[str]]:
        def act(text: str) -> list[str]:
            with self._ready:
                number = self._rounds[rank]
                self._rounds[rank] += 1
                if number == len(self._texts):
                    self._texts.append({})
                texts = self._texts[number]
                texts[rank] = text
                self._ready.notify_all()
                complete = self._ready.wait_for(
                    lambda: len(texts) == self.world or self._gone, timeout=LIMIT
                )
                assert complete, "a rank waits for ever"
                if len(texts) < self.world:
                    raise PeerGone
                return [texts[peer] for peer in range(self.world)]

        return act

    def run(self, act: Callable[[int, Callable[[str], list[str]]], Any]) -> list[Any]:
        """Return what `act(rank, gather)` returned or raised on each rank."""
        results: list[Any] = [None] * self.world

        def body(rank: int) -> None:
            try:
                results[rank] = act(rank, self.gather(rank))
            except BaseException as error:
                results[rank] = error
                with self._ready:
                    self._gone = True
                    self._ready.notify_all()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class QuickFiles(Files):
    """File operations without fsync, for tests without a real power failure."""

    def fsync(self, descriptor: int) -> None:
        pass


class Killed(BaseException):
    """The end of the process: nothing written afterwards reaches the disk."""


CALLS = tuple(name for name in vars(Files) if not name.startswith("_"))


class HookedFiles(QuickFiles):
    """File operations that call `before(name, number)` before each system call, from 1 on."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        pass


def _hooked(name: str) -> Callable[..., Any]:
    def call(self: HookedFiles, *arguments: Any) -> Any:
        self.count += 1
        self.names.append(name)
        self.before(name, arguments)
        return getattr(QuickFiles, name)(self, *arguments)

    return call


for _name in CALLS:
    setattr(HookedFiles, _name, _hooked(_name))


class DyingFiles(HookedFiles):
    """File operations with a power failure at the k-th call.

    Half of a write arrives, and unsynced data is lost.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.dead = False
        self._unsynced: set[int] = set()

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "close":
            self._forget(arguments[0])
        if self.dead:
            self._close_quietly(name, arguments)
            raise Killed
        if self.count == self.k:
            self.dead = True
            if name == "write":
                descriptor, data = arguments
                os.write(descriptor, data[: len(data) // 2])
            for descriptor in self._unsynced:
                os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
            self._close_quietly(name, arguments)
            raise Killed
        if name == "fsync":
            self._unsynced.discard(arguments[0])

    def write(self, descriptor: int, data: memoryview) -> int:
        written = _hooked("write")(self, descriptor, data)
        self._unsynced.add(descriptor)
        return written

    def _forget(self, descriptor: int) -> None:
        assert self.dead or descriptor not in self._unsynced, "closed without fsync"
        self._unsynced.discard(descriptor)

    def _close_quietly(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "close":
            os.close(arguments[0])


class FailingFiles(HookedFiles):
    """File operations whose k-th call raises `OSError(code)`.

    With `sticky`, later calls of the same name raise the error too.
    """

    def __init__(self, k: int, code: int, *, sticky: bool = False) -> None:
        super().__init__()
        self.k, self.code, self.sticky = k, code, sticky
        self.failed: str | None = None

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        again = self.sticky and name == self.failed
        if self.count == self.k or again:
            self.failed = name
            if name == "close":
                os.close(arguments[0])
            raise OSError(self.code, errno.errorcode[self.code])


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as an attacker would, with a valid signature."""
    path = folder / MANIFEST_NAME
    document = json.loads(path.read_bytes())
    change(document)
    del document["sha256"]
    path.write_bytes(sign(json.dumps(document)[1:].encode()))


def rehash(folder: Path, name: str) -> None:
    """Make the manifest agree with the current bytes of a file."""
    data = (folder / name).read_bytes()

    def change(document: dict[str, Any]) -> None:
        document["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    rewrite_manifest(folder, change)


def tree(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
