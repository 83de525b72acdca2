"""The command lines of a run: the starts that save checkpoints for forks, then the run itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.config import Config, GPTConfig, parse, resolve
from megatron.errors import ConfigError
from megatron.tasks.translation_config import TranslationConfig
from megatron.tasks.vision_config import VisionConfig
from pretrain_gpt import GRADIENT_PATHS
from tools.studies.declaration import DeclaredRun, DeclaredStudy, FlagValue

TASKS: Mapping[str, type[Config]] = {
    "pretrain_gpt.py": GPTConfig,
    "pretrain_vision.py": VisionConfig,
    "pretrain_translation.py": TranslationConfig,
}
"""The configuration that each entry script reads."""
DATA = "{data}"
"""Stands in a flag for the folder of the study's data."""
SHORT = 12
"""Hexadecimal digits of a digest in a row."""


class Commands:
    """The flags of each run of a study whose run folders are in `folder`.

    `{data}` in a flag stands for the folder `data`, which is not part of a row's settings.

    Raises `ConfigError`, naming the run, for settings that the entry script would refuse.
    """

    def __init__(self, study: DeclaredStudy, folder: Path, data: Path) -> None:
        if study.entry not in TASKS:
            raise ConfigError(f"{study.path}: entry: {study.entry}; must be one of {list(TASKS)}")
        self._study, self._folder, self._data = study, folder, data
        self._task = TASKS[study.entry]
        self._flags: dict[str, list[str]] = {}
        self._configs: dict[str, Config] = {}
        for run in study.runs:
            self._flags[run.name], self._configs[run.name] = self._complete(run)

    def folder(self, name: str) -> Path:
        """Return the run folder of a run."""
        return self._folder / name

    def config(self, run: DeclaredRun) -> Config:
        """Return the resolved configuration of a run."""
        return self._configs[run.name]

    def steps(self, run: DeclaredRun) -> int:
        """Return the number of steps of a run, including those of the run it continues."""
        return self.config(run).total_iterations()

    def digest(self, run: DeclaredRun) -> str:
        """Return a digest of all that decides the result of a run, but not its folders."""
        fork = None if run.fork is None else [run.fork.run, run.fork.step]
        settings = [self._study.entry, run.seed, run.ranks, run.tokens, dict(run.flags), fork]
        if run.fork is not None:
            settings.append(self.digest(self._study.run(str(run.base))))
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:SHORT]

    def starts(self, run: DeclaredRun) -> Iterator[tuple[DeclaredRun, list[str]]]:
        """Yield the starts that a run needs, each with the run that it starts.

        Evaluated lazily: existing checkpoints are looked up when a start's turn comes. A fork may
        need its base's checkpoint again, whose row comes from another machine.
        """
        if run.base is not None:
            base = self._study.run(run.base)
            yield from self._to_forks(base, last=run.fork.step if run.fork else 0)
        else:
            yield from self._to_forks(run)
        yield run, self._flags[run.name]

    def _to_forks(
        self, base: DeclaredRun, *, last: int | None = None
    ) -> Iterator[tuple[DeclaredRun, list[str]]]:
        """Yield the starts of a run that save a checkpoint for each fork, up to step `last`."""
        steps = {
            run.fork.step
            for run in self._study.runs
            if run.fork is not None and run.base == base.name
        }
        for step in sorted(steps):
            saved = self.folder(base.name) / "checkpoints" / f"step_{step:08d}"
            if not saved.is_dir() and (last is None or step <= last):
                yield base, [*self._flags[base.name], "--exit-interval", str(step)]

    def _complete(self, run: DeclaredRun) -> tuple[list[str], Config]:
        """Return the flags of a run with those that the study sets, and its configuration."""
        flags = dict(run.flags)
        batch = flags.get("global-batch-size")
        if isinstance(batch, int) and "micro-batch-size" not in flags:
            flags["micro-batch-size"] = max(1, batch // run.ranks)
        if run.tokens is not None:
            flags["train-iters"] = self._iterations(run)
        flags |= {"seed": run.seed, "run-dir": str(self.folder(run.name))}
        if run.fork is not None:
            flags |= {"load": str(self.folder(str(run.base))), "ckpt-step": run.fork.step}
        found = [word.replace(DATA, str(self._data)) for word in as_words(flags)]
        if "eval-interval" not in flags:
            steps = self._resolved(run, found).total_iterations()
            found += ["--eval-interval", str(steps)]
        config = self._resolved(run, found)
        if run.fork is not None and run.fork.step >= config.total_iterations():
            raise ConfigError(
                self._told(run, f"fork.step: {run.fork.step}; the run has fewer steps")
            )
        return found, config

    def _iterations(self, run: DeclaredRun) -> int:
        """Return the steps that have the run's tokens."""
        if given := {"train-iters", "train-samples"} & run.flags.keys():
            raise ConfigError(self._told(run, f"tokens: {min(given)} gives the length too"))
        sizes: list[int] = []
        for name in ("global-batch-size", "seq-length"):
            value = run.flags.get(name)
            if not isinstance(value, int):
                raise ConfigError(self._told(run, f"tokens: needs {name} among the flags"))
            sizes.append(value)
        step = sizes[0] * sizes[1]
        if run.tokens is None or run.tokens % step:
            raise ConfigError(
                self._told(run, f"tokens: {run.tokens}; must be a multiple of a step's {step}")
            )
        return run.tokens // step

    def _resolved(self, run: DeclaredRun, flags: list[str]) -> Config:
        try:
            return resolve(parse(flags, paths=GRADIENT_PATHS, task=self._task), run.ranks)
        except ConfigError as error:
            raise ConfigError(self._told(run, str(error))) from None

    def _told(self, run: DeclaredRun, problem: str) -> str:
        return f"{self._study.path}: run {run.group}: {problem}"


def as_words(flags: Mapping[str, FlagValue]) -> Iterator[str]:
    """Yield the words of a command line; a list gives one flag several values."""
    for name, flag in flags.items():
        yield f"--{name}"
        for value in flag if isinstance(flag, list) else [flag]:
            yield str(value).lower() if isinstance(value, bool) else str(value)
