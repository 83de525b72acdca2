"""Errors that a user can cause or must know of, each with its exit code (docs/fault-tolerance.md).

The message is one line: the problem, the value, the rule, the way out. Entry scripts print that
line and exit with the code; a traceback appears only with `--debug`.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_REQUEUE = 75
"""The state is saved and the run wants to be started again."""


class SparsetronError(Exception):
    """Base class of every error with an exit code of its own."""

    exit_code = 1
    shared = False
    """True if every rank raises this error, so that one rank can report it for all."""

    def __str__(self) -> str:
        """Return the message on one line.

        Names of files and values may hold line breaks and terminal control sequences, which are
        escaped as in a Python string.
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
    """The numbers went wrong in a way that further training would hide."""

    exit_code = 5


class PeerError(SparsetronError):
    """Another rank failed, or a collective failed."""

    exit_code = 6


ERRORS_BY_CODE: dict[int, type[SparsetronError]] = {
    kind.exit_code: kind
    for kind in (ConfigError, DataError, CheckpointError, NumericsError, PeerError)
}


def missing_extra(package: str, extra: str) -> ConfigError:
    """Return the error for an optional package that is absent; it names the extra to install."""
    return ConfigError(f"{package}: not installed; run: pip install 'sparsetron[{extra}]'")
