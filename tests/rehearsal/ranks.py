"""Ranks with a device each, for tests of grids: ranks of `tests.ranks`, or of MPI."""

from __future__ import annotations

import importlib
import sys
from multiprocessing.connection import Connection
from typing import Any

from tests.ranks import Ranks, serve


def call(ranks: Ranks, function: str, **arguments: Any) -> list[Any]:
    """Return what `function`, "module:name", returns on each of two ranks for its process groups
    and the arguments. The module is imported there alone, as it needs the device."""
    return ranks.run(2, _call, function, arguments)


def _call(groups: Any, function: str, arguments: dict[str, Any]) -> Any:
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(groups, **arguments)


def life(pipe: Connection, store: str, rank: int, world: int) -> None:
    """Life of a rank of `tests.ranks.Spawned`."""
    _install()
    serve(pipe, store, rank, world)


def _install() -> None:
    importlib.import_module("tests.rehearsal.device")  # before torch
    importlib.import_module("tests.rehearsal.nccl").install()


def main(address: str, store: str) -> None:
    """Life of a rank of `tests.mpi_ranks.MPIJob`."""
    _install()
    importlib.import_module("tests.mpi_ranks").main(address, store)


if __name__ == "__main__":
    main(*sys.argv[1:])
