"""The part of a gradient path that the configuration knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron.config.refused_pairs import RefusedPair


class PathOptions(Protocol):
    """A value of `--grad-path` with the settings that it adds."""

    @property
    def name(self) -> str:
        """The value of the flag."""
        ...

    @property
    def sections(self) -> Mapping[str, type]:
        """Sections of the configuration file by name, each a frozen dataclass of options with one
        flag for each field. Paths may share a section."""
        ...

    @property
    def refused_pairs(self) -> Sequence[RefusedPair]:
        """Settings that exclude each other on this path, in addition to those that exclude each
        other everywhere. `--help-compat` prints these pairs; `parse` checks them before `check`."""
        ...

    def check(self, config: Any) -> None:
        """Raise `ConfigError` for settings with which this path cannot run."""
        ...
