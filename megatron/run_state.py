"""What a run saves, and what it takes back when the same command is given again.

Each owner of state offers it by logical name; here the names meet files. State is saved once for
all data-parallel ranks, spread over them for speed, but for what each of them has of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.locate import CHECKPOINTS, checkpoints_folder, find_checkpoint
from megatron.checkpoint.store import Checkpoint, Shard, of_rank, owner, save_checkpoint, whole
from megatron.config import Config
from megatron.data.vocabulary import Vocabulary
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.interface import ParamInfo
from megatron.errors import CheckpointError
from megatron.metrics import Metrics
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.loss_scaler import LossScaler
from megatron.parallel.groups import ProcessGroups
from megatron.training import Progress

_FREE_TO_CHANGE = {
    "model": {
        "attention_dropout",
        "hidden_dropout",
        "init_method_std",
        "make_vocab_size_divisible_by",
    },
    "data": {"data_cache_path", "no_mmap_bin_files", "dataloader_type"},
}
_OF_THE_DATA = ("seed", "global_batch_size", "rampup_batch_size")
MAX_DIFFERENCES = 5
"""Differing keys an error names before it counts the rest."""


def identity(config: Config, vocabulary: Vocabulary) -> dict[str, Any]:
    """Settings that a checkpoint and the run that loads it must share, by dotted name."""
    found: dict[str, Any] = {"data.tokenizer": vocabulary.fingerprint}
    for section in ("model", "data"):
        values = dataclasses.asdict(getattr(config, section))
        for name in values.keys() - _FREE_TO_CHANGE[section]:
            found[f"{section}.{name}"] = values[name]
    for name in _OF_THE_DATA:
        found[f"training.{name}"] = getattr(config.training, name)
    found["model.vocab_size"] = vocabulary.size
    found["gradient.grad_path"] = config.gradient.grad_path
    for section, options in config.extensions.items():
        for name, value in dataclasses.asdict(options).items():  # type: ignore[call-overload]
            found[f"{section}.{name}"] = value
    return json.loads(json.dumps(found))


def save_directory(config: Config, run_dir: Path) -> Path:
    """Where checkpoints of a run go."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir / CHECKPOINTS


@dataclass(frozen=True)
class Origin:
    """The step folder a run starts from. `own`: this very run saved it, and goes on; else it is
    another's, of which `--finetune` and `--no-load-optim` may leave out parts."""

    path: Path
    own: bool


def locate_checkpoint(
    config: Config, run_dir: Path, *, say: Callable[[str], None]
) -> Origin | None:
    """Where to start from: the newest good checkpoint of this run, else of `--load`; None for
    step 0. One rank calls it for all.

    Raises `CheckpointError` where committed folders are there and none verifies, where `--load`
    names another place and nothing was ever committed there, and for `--ckpt-step` of this run's
    own folder when that is not its newest: two histories would share the steps after it.
    """
    asked = config.checkpoint
    own_place = save_directory(config, run_dir)
    elsewhere = asked.load is not None and (
        checkpoints_folder(Path(asked.load)).resolve() != own_place.resolve()
    )
    own_step = None if elsewhere else asked.ckpt_step
    own = None
    if own_place.exists() or own_step is not None:
        own = find_checkpoint(own_place, say=say, step=own_step, repair=own_step is None)
    if own is not None:
        _refuse_to_branch(own, own_place, own_step)
        return Origin(own, own=True)
    if asked.load is None:
        return None
    other = find_checkpoint(asked.load, say=say, step=asked.ckpt_step) if elsewhere else None
    if other is None and (elsewhere or asked.exit_on_missing_checkpoint):
        raise CheckpointError(
            f"{asked.load}: no checkpoint was ever committed there; check --load, or leave it "
            "out to start at step 0"
        )
    return Origin(other, own=False) if other is not None else None


def _refuse_to_branch(found: Path, directory: Path, step: int | None) -> None:
    newest = find_checkpoint(directory, say=lambda text: None) if step is not None else found
    if newest != found:
        raise CheckpointError(
            f"ckpt_step: {step} is not the newest of {directory}; to go another way from there, "
            f"give --load {directory} --ckpt-step {step} and a new --run-dir"
        )


@dataclass(kw_only=True)
class RunState:
    """Saves and restores everything a run consists of. Every rank calls both together."""

    config: Config
    run_dir: Path
    groups: ProcessGroups
    engine: GradientEngine
    optimizer: BucketOptimizer
    scaler: LossScaler
    metrics: Metrics
    identity: dict[str, Any]

    # ---- saving --------------------------------------------------------------------------------

    def save(self, progress: Progress) -> None:
        """Commit a checkpoint of the step just finished. Raises the same `CheckpointError` on
        every rank where it cannot be written; what was there before stays."""
        began = time.perf_counter()
        self.metrics.flush()
        path = save_checkpoint(
            save_directory(self.config, self.run_dir),
            step=progress.iteration,
            tensors=list(self._shards()),
            state=self._json(progress),
            rank=self.groups.world.rank,
            world=self.groups.world.size,
            gather=self.groups.world.gather_text,
            grid=dataclasses.asdict(self.groups.dims),
            packages={"torch": torch.__version__},
            say=self.metrics.say,
        )
        self.metrics.saved(progress.iteration)
        seconds = time.perf_counter() - began
        self.metrics.say(f"saved checkpoint {path} in {seconds:.1f} s")

    def _json(self, progress: Progress) -> dict[str, Any]:
        return {
            "progress": dataclasses.asdict(progress),
            "applied_updates": self.optimizer.applied,
            "loss_scaler": self.scaler.state(),
            "identity": self.identity,
            "schedule": _schedule(self.config),
        }

    def _shards(self) -> Iterator[Shard]:
        rank, size = self.groups.dp.rank, self.groups.dp.size
        shared = {name: tensor for name, tensor, _ in self._shared()}
        owners = owner({name: tensor.nbytes for name, tensor in shared.items()}, size)
        for name, tensor in shared.items():
            if owners[name] == rank:
                yield whole(name, tensor)
        for name, tensor in self.engine.reducer.state_tensors():
            own = whole(f"residual/{name}", tensor)
            yield of_rank(own, data_parallel_rank=rank, data_parallel_size=size)

    def _shared(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """State equal on all data-parallel ranks: name, logical view, kind ("param" or moment).

        Padding rows of the vocabulary lie at the end of the slice and are left out.
        """
        skip_moments = self.config.checkpoint.no_save_optim
        for kind, name, flat in self.optimizer.tensors():
            if kind == "param" or not skip_moments:
                yield f"{kind}/{name}", _logical(self.engine.infos[name], flat), kind

    # ---- loading -------------------------------------------------------------------------------

    def restore(self, origin: Origin) -> Progress:
        """Take back a checkpoint that `locate_checkpoint` found.

        Raises `CheckpointError`, on every rank, for one that does not fit this run, naming the
        keys that differ.
        """
        asked = self.config.checkpoint
        weights_only = asked.finetune and not origin.own
        fresh_moments = (asked.finetune or asked.no_load_optim) and not origin.own
        with Checkpoint.open(origin.path, verify=False) as saved:
            self.groups.world.agreed(lambda: self._check_identity(saved, weights_only))
            self.groups.world.agreed(lambda: self._take(saved, fresh_moments))
            if not self.config.training.skip_train:
                self._announce_changes(saved)
        progress = Progress() if weights_only else Progress(**saved.state["progress"])
        self.metrics.say(f"loaded checkpoint {origin.path} of step {saved.step}")
        return progress

    def _announce_changes(self, saved: Checkpoint) -> None:
        was = saved.state.get("schedule", {})
        for key, value in _schedule(self.config).items():
            if was.get(key) != value:
                self.metrics.say(f"{key}: {was.get(key)} in the checkpoint, {value} from here on")

    def _check_identity(self, saved: Checkpoint, weights_only: bool) -> None:
        keys = list(self.identity)
        if weights_only:
            keys = [k for k in keys if k.startswith("model.") and k != "model.seq_length"]
        was = saved.state.get("identity", {})
        differing = [
            f"{key}: {was.get(key)!r} there, {self.identity[key]!r} here"
            for key in sorted(keys)
            if was.get(key) != self.identity[key]
        ]
        if differing:
            rest = len(differing) - MAX_DIFFERENCES
            more = f" and {rest} more" if rest > 0 else ""
            raise CheckpointError(
                f"{saved.path}: belongs to another run: {'; '.join(differing[:MAX_DIFFERENCES])}"
                f"{more}; use another --run-dir, or give the same settings"
            )

    def _take(self, saved: Checkpoint, fresh_moments: bool) -> None:
        stored = set(saved.names())
        for name, view, kind in self._shared():
            if kind != "param" and fresh_moments:
                continue
            if name not in stored:
                raise CheckpointError(
                    f"{saved.path}: has no {name}: it was saved without optimizer state or by "
                    "another optimizer; give --load and --no-load-optim to start that from nothing"
                )
            view.copy_(saved.read(name))
        self.optimizer.loaded()
        if not fresh_moments:
            self.optimizer.applied = int(saved.state["applied_updates"])
            self.scaler.load(saved.state["loss_scaler"])
        self.engine.reducer.load_state_tensors(dict(self._own(saved)))

    def _own(self, saved: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's share of per-rank state; for another number of ranks the mean of the old
        ones, which keeps the update that is pending in them."""
        rank, size = self.groups.dp.rank, self.groups.dp.size
        prefix = "residual/"
        for name in saved.names(prefix):
            ranks, *rest = saved.shape(name)
            if ranks == size:
                whole_box = [rank] + [0] * len(rest), [rank + 1, *rest]
                value = saved.read(name, *whole_box)[0]
            else:
                value = saved.read(name).mean(0)
            yield name.removeprefix(prefix), value


def _schedule(config: Config) -> dict[str, Any]:
    """Settings that a resumed run may change, with effect from here on."""
    found = {f"optimizer.{k}": v for k, v in dataclasses.asdict(config.optimizer).items()}
    found["training.train_iters"] = config.training.train_iters
    found["training.train_samples"] = config.training.train_samples
    return found


def _logical(info: ParamInfo, flat: torch.Tensor) -> torch.Tensor:
    entries = math.prod(info.logical_shape)
    return flat[:entries].view(info.logical_shape)
