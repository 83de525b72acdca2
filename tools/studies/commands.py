"""The command lines of a run: the starts that save checkpoints for forks, and the run itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.compatibility import check_path, identity
from megatron.config import Config, GPTConfig, parse, resolve
from megatron.config.parsing import read_entries
from megatron.errors import CheckpointError, ConfigError
from megatron.tasks import gpt, translation, vision
from megatron.tasks.translation_config import TranslationConfig
from megatron.tasks.vision_config import VisionConfig
from pretrain_gpt import GRADIENT_PATHS
from tools.studies.declaration import DeclaredRun, DeclaredStudy, FlagValue, Score

TASKS: Mapping[str, type[Config]] = {
    "pretrain_gpt.py": GPTConfig,
    "pretrain_vision.py": VisionConfig,
    "pretrain_translation.py": TranslationConfig,
}
"""The configuration that each entry script reads."""
FREE = {GPTConfig: gpt.FREE, VisionConfig: vision.FREE, TranslationConfig: translation.FREE}
"""Settings in which a run may differ from the checkpoint that it loads."""
DATA = "{data}"
"""Stands in a flag for the folder of the study's data."""
SHORT = 12
"""Hexadecimal digits of a digest in a row."""
SIZES = ("tensor-model-parallel-size", "pipeline-model-parallel-size")
"""Flags of the axes whose ranks share one batch."""
FOLDERS = ("run-dir", "load")
"""Flags that the study sets to folders of its runs."""
SHARED = ("model.", "data.", "training.")
"""Sections that a fork shares with its base, but for `FREE`."""


class Commands:
    """The flags of each run of a study whose run folders are in `folder`.

    `{data}` in a flag stands for the folder `data`, which is not part of a row's settings.

    Raises `ConfigError`, naming the run, for settings that the entry script would refuse.
    """

    def __init__(self, study: DeclaredStudy, folder: Path, data: Path) -> None:
        if study.entry not in TASKS:
            known = ", ".join(TASKS)
            raise ConfigError(f"{study.path}: entry: {study.entry}; must be one of {known}")
        self._study, self._folder, self._data = study, folder, data
        self._task = TASKS[study.entry]
        self._flags: dict[str, list[str]] = {}
        self._declared: dict[str, dict[str, FlagValue]] = {}
        self._configs: dict[str, Config] = {}
        for run in study.runs:
            flags, self._configs[run.name] = self._complete(run)
            self._flags[run.name] = self._words(flags)
            self._declared[run.name] = {k: v for k, v in flags.items() if k not in FOLDERS}
        for run in study.runs:
            if run.fork is not None:
                self._check_fork(run, study.base(run), run.fork.step)

    def flags(self, run: DeclaredRun, *, until: int | None = None) -> list[str]:
        """Return the flags of a run; with `until`, it saves and leaves after this step."""
        leave = [] if until is None else ["--exit-interval", str(until)]
        return [*self._flags[run.name], *leave]

    def declared(self, run: DeclaredRun) -> Mapping[str, FlagValue]:
        """Return the flags of a run with those that the study sets, without folders of runs."""
        return self._declared[run.name]

    def folder(self, run: DeclaredRun) -> Path:
        """Return the run folder of a run."""
        return self._folder / run.name

    def checkpoint(self, run: DeclaredRun, step: int) -> Path:
        """Return the folder of a checkpoint of a run."""
        return self.folder(run) / "checkpoints" / f"step_{step:08d}"

    def fork_steps(self, base: DeclaredRun) -> list[int]:
        """Return the steps, rising, after which runs fork from this one."""
        runs = (run for run in self._study.runs if run.base == base.name)
        return sorted({run.fork.step for run in runs if run.fork is not None})

    def config(self, run: DeclaredRun) -> Config:
        """Return the resolved configuration of a run."""
        return self._configs[run.name]

    def steps(self, run: DeclaredRun) -> int:
        """Return the number of steps of a run, with those of the run that it continues."""
        return self.config(run).total_iterations()

    def data_parallel(self, run: DeclaredRun) -> int:
        """Return the data-parallel size of a run."""
        return self.config(run).data_parallel_size(run.ranks)

    def file_of(self, score: Score) -> str:
        """Return the file on which a score is computed."""
        return self._placed(score.file)

    def check_losses(self) -> None:
        """Raise `ConfigError` for a run that would end without a validation loss.

        The times of a step can be measured without one, so that other tools do not ask this.
        """
        for run in self._study.runs:
            evaluation = self.config(run).evaluation
            if not (evaluation.eval_iters or evaluation.full_validation):
                raise self._error(
                    run, "eval-iters: 0; the run would have no loss; give more, or full-validation"
                )

    def check_files(self) -> None:
        """Raise `ConfigError` if the file of a score is missing, or a file has another digest.

        This is asked before hours of training.
        """
        for score in self._study.scores:
            if not Path(self.file_of(score)).is_file():
                where = f"{self._study.path}: scores.{score.name}.file"
                raise ConfigError(f"{where}: {self.file_of(score)} is no file")
        for name, digest in self._study.sha256.items():
            file, where = self._placed(name), f"{self._study.path}: sha256.{name}"
            if _content(file, where) != digest:
                raise ConfigError(f"{where}: {file} is another file; --data names the folder")

    def digest(self, run: DeclaredRun) -> str:
        """Return a digest of what a study file and the configuration that it names say of a run.

        Folders are left out, and defaults of the program too: the row names the commit.
        """
        settings: list[object] = [self._study.entry, run.seed, run.ranks, run.tokens]
        settings.append(dict(run.flags))
        if "config" in run.flags:
            settings.append(_content(self._placed(str(run.flags["config"])), "config"))
        if run.fork is not None:
            settings += [run.fork.run, run.fork.step, self.digest(self._study.base(run))]
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:SHORT]

    def _complete(self, run: DeclaredRun) -> tuple[dict[str, FlagValue], Config]:
        """Return the flags of a run with those that the study sets, and its configuration."""
        flags: dict[str, FlagValue] = {
            **run.flags,
            "seed": run.seed,
            "run-dir": str(self.folder(run)),
        }
        if run.fork is not None:
            base = self._study.base(run)
            flags |= {"load": str(self.folder(base)), "ckpt-step": run.fork.step}
        given = run.flags.keys() | self._in_configuration(run)
        if "micro-batch-size" not in given and isinstance(
            batch := run.flags.get("global-batch-size"), int
        ):
            copies = run.ranks
            for name in SIZES:
                size = run.flags.get(name, 1)
                copies //= size if isinstance(size, int) and size > 0 else 1
            flags["micro-batch-size"] = max(1, batch // max(1, copies))
        if run.tokens is not None:
            if twice := {"train-iters", "train-samples"} & run.flags.keys():
                raise self._error(run, f"tokens: {min(twice)} gives the length too")
            flags["train-iters"] = run.tokens  # until the size of a step is known
        config = self._resolved(run, self._words(flags))
        if run.tokens is not None:
            flags["train-iters"] = self._iterations(run, config)
        if "eval-interval" not in given:
            flags["eval-interval"] = self._resolved(run, self._words(flags)).total_iterations()
        config = self._resolved(run, self._words(flags))
        self._check(run, config)
        return flags, config

    def _in_configuration(self, run: DeclaredRun) -> set[str]:
        """Return the flags that the configuration file of a run gives."""
        if "config" not in run.flags:
            return set()
        try:
            entries = read_entries(self._placed(str(run.flags["config"])))
        except ConfigError as error:
            raise self._error(run, str(error)) from None
        return {entry.key.replace("_", "-") for entry in entries}

    def _words(self, flags: Mapping[str, FlagValue]) -> list[str]:
        return [self._placed(word) for word in as_words(flags)]

    def _placed(self, word: str) -> str:
        return word.replace(DATA, str(self._data))

    def _iterations(self, run: DeclaredRun, config: Config) -> int:
        """Return the steps that have the run's tokens."""
        if not isinstance(config, GPTConfig):
            raise self._error(run, "tokens: of language models only; give train-iters")
        batch = config.training.global_batch_size
        if batch is None:
            raise self._error(run, "tokens: needs global-batch-size")
        step = batch * config.model.seq_length
        if run.tokens is None or run.tokens % step:
            raise self._error(run, f"tokens: {run.tokens}; must be a multiple of a step's {step}")
        return run.tokens // step

    def _check(self, run: DeclaredRun, config: Config) -> None:
        """Refuse settings with which a run would not make all of its steps and checkpoints."""
        if run.fork is not None and run.fork.step >= config.total_iterations():
            raise self._error(run, f"fork.step: {run.fork.step}; the run has fewer steps")
        for name in ("exit_interval", "exit_duration_in_mins", "skip_train"):
            if getattr(config.training, name, None):
                raise self._error(run, f"{name}: the run would not make all of its steps")
        if self.fork_steps(run):
            for name in ("keep_last", "save_retain_interval"):
                if getattr(config.checkpoint, name):
                    flag = name.replace("_", "-")
                    # The configurations of configs/ set keep_last.
                    raise self._error(
                        run, f"{flag}: would delete checkpoints that forks load; give none"
                    )

    def _check_fork(self, run: DeclaredRun, base: DeclaredRun, step: int) -> None:
        """Refuse a fork whose base has no checkpoint of the step, or one that it could not load.

        The run itself would refuse the checkpoint as well, but only after its base has trained.
        """
        if step > self.steps(base):
            raise self._error(run, f"fork.step: {step}; {base.group} has {self.steps(base)} steps")
        config = self.config(run)
        if config.checkpoint.finetune:
            raise self._error(
                run, "finetune: would count from step 0; a fork counts on; leave it out"
            )
        was, now = (identity(each, free=FREE[self._task]) for each in (self.config(base), config))
        self._check_shared(run, base, was, now)
        try:
            check_path(
                was,
                now,
                where=self.checkpoint(base, step),
                own=False,
                reset=config.checkpoint.reset_grad_state,
                log=lambda _: None,
            )
        except CheckpointError as error:
            raise self._error(run, str(error)) from None

    def _check_shared(
        self, run: DeclaredRun, base: DeclaredRun, was: Mapping[str, Any], now: Mapping[str, Any]
    ) -> None:
        """Refuse a fork whose model, data or batch size is not that of its base."""
        differing = {
            key.rpartition(".")[2].replace("_", "-"): (now[key], was[key])
            for key in now
            # What no flag gives may follow from files, as the size of a vocabulary does.
            if key.startswith(SHARED) and None not in (was[key], now[key]) and was[key] != now[key]
        }
        if differing:
            # One that the file gives, and not one that follows from it.
            flag = min(differing, key=lambda name: (name not in {*run.flags, *base.flags}, name))
            here, there = differing[flag]
            raise self._error(
                run,
                f"{flag}: {here}; {base.group}, whose checkpoint it loads, has {there}; give both "
                "the same",
            )

    def _resolved(self, run: DeclaredRun, flags: list[str]) -> Config:
        try:
            return resolve(parse(flags, paths=GRADIENT_PATHS, task=self._task), run.ranks)
        except ConfigError as error:
            raise self._error(run, str(error)) from None

    def _error(self, run: DeclaredRun, problem: str) -> ConfigError:
        return ConfigError(f"{self._study.path}: run {run.group}: {problem}")


def as_words(flags: Mapping[str, FlagValue]) -> Iterator[str]:
    """Yield the words of a command line; a list gives one flag several values."""
    for name, flag in flags.items():
        yield f"--{name}"
        for value in flag if isinstance(flag, list) else [flag]:
            yield str(value).lower() if isinstance(value, bool) else str(value)


def _content(path: str, where: str) -> str:
    """Return the SHA-256 of a file."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{where}: {path}: cannot be read: {error.strerror}") from None
