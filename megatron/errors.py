"""Errors a user can cause or must know of, each with its exit code (docs/fault-tolerance.md).

The message is one line: what is wrong, the value seen, the rule, the way out. Entry scripts turn
these into that line and the exit code; a traceback appears only with `--debug`.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_REQUEUE = 75
"""State is saved and the run wants to be started again."""


class SparsetronError(Exception):
    """Base of every error with an exit code of its own."""

    exit_code = 1
    shared = False
    """Whether every rank raises this one, so that one of them can tell it for all."""

    def __str__(self) -> str:
        """The message on one line.

        Names of files and values may hold line breaks and sequences that command a terminal; those
        are written as Python writes them in a string.
        """
        text = super().__str__()
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ConfigError(SparsetronError):
    """A flag, a configuration file or the launch itself is wrong."""

    exit_code = 2


class DataError(SparsetronError):
    """A data set, vocabulary or raw text is missing, damaged or unfit."""

    exit_code = 3


class CheckpointError(SparsetronError):
    """A checkpoint cannot be written, read or used by this run."""

    exit_code = 4


class NumericsError(SparsetronError):
    """The numbers went wrong in a way that going on would hide."""

    exit_code = 5


class PeerError(SparsetronError):
    """Another rank failed, or a collective did."""

    exit_code = 6


ERRORS_BY_CODE: dict[int, type[SparsetronError]] = {
    kind.exit_code: kind
    for kind in (ConfigError, DataError, CheckpointError, NumericsError, PeerError)
}


def missing_extra(package: str, extra: str) -> ConfigError:
    """The error for an optional package that is absent: names the extra that brings it."""
    return ConfigError(f"{package}: not installed; run: pip install 'sparsetron[{extra}]'")
