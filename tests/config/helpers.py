"""A small configuration to break, gradient paths to choose from, and checks of a refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron.config import Config, GPTConfig, PathOptions, above, option, parse, section
from megatron.errors import ConfigError
from tools.configuration import TASKS

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
}
REQUIRED = {**MODEL, "micro_batch_size": 2}
SMALL = {**REQUIRED, "train_iters": 10, "lr": 0.001}


def task_of(file: Path) -> type[Config]:
    """The configuration that a file in configs/ is of: its first line may name an entry script."""
    first, _, _ = file.read_text(encoding="utf-8").partition("\n")
    named = [task for task in TASKS if f"pretrain_{task.task}.py" in first]
    return named[0] if named else GPTConfig


@section
class SparseConfig:
    """Options of a path that sends a part of the gradient."""

    sparse_density: float = option(
        default=0.01, help="Share of entries that are sent.", within=above(0)
    )
    sparse_style: Literal["top", "random"] = option(default="top", help="Which ones.")
    sparse_layers: tuple[int, ...] | None = option(default=None, help="Which layers (none = all).")


@section
class PruneConfig:
    """Options of a path that keeps a part of the network."""

    prune_share: float = option(default=0.9, help="Share of entries that are gone.")


class FakePath(PathOptions):
    """A gradient path as far as the configuration sees it."""

    def __init__(self, name: str, sections: Mapping[str, type] = {}) -> None:
        self.name, self.sections = name, sections

    def check(self, config: Any) -> None:
        if config.run.debug and self.name == "sparse":
            raise ConfigError("debug true: the path sparse cannot run with it; drop --debug")


PATHS = {
    path.name: path
    for path in (
        FakePath("dense"),
        FakePath("sparse", {"sparse": SparseConfig}),
        FakePath("prune", {"prune": PruneConfig}),
        FakePath("prune+sparse", {"prune": PruneConfig, "sparse": SparseConfig}),
    )
}


def flags(fields: dict[str, Any]) -> list[str]:
    """A command line that sets the fields."""
    line: list[str] = []
    for name, value in fields.items():
        values = value if isinstance(value, tuple) else (value,)
        line += ["--" + name.replace("_", "-"), *(str(v).removesuffix(".0") for v in values)]
    return line


def read(*more: str, base: dict[str, Any] = SMALL) -> GPTConfig:
    """The small configuration with more flags."""
    return parse([*flags(base), *more], paths=PATHS)


def read_yaml(path: Path, text: str, more: Sequence[str] = ()) -> GPTConfig:
    """The configuration of a file with this text."""
    path.write_text(text, encoding="utf-8")
    return parse(["--config", str(path), *more], paths=PATHS)


def refusal(argv: Sequence[str]) -> str:
    """The error that the command line gets; it is one line."""
    with pytest.raises(ConfigError) as caught:
        parse(argv, paths=PATHS)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert message and message.isprintable(), repr(message)
    return message


def refused(*more: str, base: dict[str, Any] = SMALL) -> str:
    """The error of the small configuration with more flags."""
    return refusal([*flags(base), *more])


def refused_yaml(path: Path, text: str | bytes) -> str:
    """The error of a file with this text, without the folder it lies in."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return refusal(["--config", str(path)]).replace(f"{path.parent}/", "")


def yaml_text(fields: dict[str, Any] = SMALL) -> str:
    """A flat file with these fields."""
    return "".join(f"{name}: {value}\n" for name, value in fields.items())
