"""One rank of the parity self-test: trains every case and writes its parts of all tensors.

Started by `parity.py`, once for each rank, with its settings as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron.config import parse, resolve  # noqa: E402
from megatron.data_parallel.bucket import ParamInfo  # noqa: E402
from megatron.data_parallel.reducer import Step  # noqa: E402
from megatron.launch import (  # noqa: E402
    Runtime,
    detect_launch,  # noqa: E402
    start,
)
from megatron.metrics import NullMetrics  # noqa: E402
from megatron.parallel.groups import ProcessGroups  # noqa: E402
from megatron.pretrain import build_groups, build_trainer, leave  # noqa: E402
from megatron.training import Trainer  # noqa: E402
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS  # noqa: E402
from tools.parity_cases import CASES, ParityCase, ParityGrid, flags_of  # noqa: E402


def main(arguments: Sequence[str]) -> int:
    """Train every case as one rank, write the results, and return the exit code."""
    settings = json.loads(arguments[0])
    grid, extra = ParityGrid(**settings["grid"]), settings["extra"]
    launch = detect_launch()
    by_name = {case.name: case for case in CASES}
    cases = [by_name[name] for name in settings["cases"]]
    first = resolve(parse(flags_of(cases[0], grid, extra), paths=GRADIENT_PATHS), grid.ranks)
    runtime = start(launch, first)
    torch.set_num_threads(1)
    groups = build_groups(first, launch)
    for case in cases:
        with tempfile.TemporaryDirectory() as own:
            found = run_case(case, grid, runtime, groups, Path(own), extra)
        save(found, Path(settings["folder"]), case, rank=launch.rank)
    groups.world.barrier()
    return 0


def run_case(
    case: ParityCase,
    grid: ParityGrid,
    runtime: Runtime,
    groups: ProcessGroups,
    own: Path,
    extra: Sequence[str] = (),
) -> dict[str, Any]:
    """Train a case, and return its losses and this rank's part of each tensor.

    "losses" has one loss per step. By tensor, "gradients" has the mean gradient of the first step,
    "weights" the last values, and "pieces" the position of the part in the whole tensor.
    """
    config = resolve(parse(flags_of(case, grid, extra), paths=GRADIENT_PATHS), grid.ranks)
    trainer = build_trainer(
        GPT_TASK, GRADIENT_PATHS, config, runtime, groups, own, NullMetrics(), None
    )
    gradients: dict[str, np.ndarray] = {}
    _watch_first_step(trainer, gradients)
    losses = [trainer.train_step()[0].loss for _ in range(case.steps)]
    trainer.optimizer.finish_param_gather()
    weights = {info.name: _held(info, info.param.detach().reshape(-1)) for info in _infos(trainer)}
    pieces = {info.name: _piece(info) for info in _infos(trainer)}
    trainer.engine.detach()
    return {"losses": losses, "gradients": gradients, "weights": weights, "pieces": pieces}


def save(found: dict[str, Any], folder: Path, case: ParityCase, *, rank: int) -> None:
    """Write the result of `run_case` for `parity_compare`."""
    stem = folder / f"{case.name} {rank}"
    arrays = {
        f"{kind}/{name}": array
        for kind in ("gradients", "weights")
        for name, array in found[kind].items()
    }
    np.savez(f"{stem}.npz", **arrays)
    facts = {"losses": found["losses"], "pieces": found["pieces"]}
    Path(f"{stem}.json").write_text(json.dumps(facts), encoding="utf-8")


def _watch_first_step(trainer: Trainer, gradients: dict[str, np.ndarray]) -> None:
    engine, finish = trainer.engine, trainer.engine.finish

    def watched(*, tag: int, clip_norm: float = 0.0, request: int = 0) -> Step:
        step = finish(tag=tag, clip_norm=clip_norm, request=request)
        engine.finish = finish  # type: ignore[method-assign]
        for info, bucket, where in engine.slices():
            reduced = step.reduced[bucket.index]
            assert reduced.index is None, "the first step of every case sends what there is"
            dense = torch.zeros_like(info.param, dtype=torch.float32)
            engine.layout.scatter(info.name, where.of(reduced.values).float(), dense)
            gradients[info.name] = _held(info, dense.reshape(-1))
        return step

    engine.finish = watched  # type: ignore[method-assign]


def _infos(trainer: Trainer) -> list[ParamInfo]:
    return [info for info, _, _ in trainer.engine.slices()]


def _held(info: ParamInfo, flat: torch.Tensor) -> np.ndarray:
    return flat[: info.local_entries].view(info.local_shape).float().numpy().copy()


def _piece(info: ParamInfo) -> dict[str, Any]:
    boxes = [((0,) * len(info.logical_shape), info.logical_shape)] * 2
    pairs = [boxes] if info.tp_shard is None else list(info.tp_shard.boxes())
    return {"shape": info.logical_shape, "boxes": pairs}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        print("parity_rank.py: tools/parity.py starts this; run that", file=sys.stderr)
        sys.exit(2)
    leave(main(sys.argv[1:]))
