"""Figure 10 of the AxoNN paper at our size: message-driven training beside plain PyTorch.

    python -m tools.bench.axonn_validation.run --text-folder TEXT [--out FOLDER]   20 minutes
    python -m tools.bench.axonn_validation.run --smoke                             a few steps
    python -m tools.bench.axonn_validation.run --redraw FOLDER     page and picture from its JSON

A GPT of 10M parameters (of tools/bench/grids) trains from the same weights on the same samples in
stock PyTorch, one process (`plain_training.py`), and by ours with G_inter = 2 x G_data = 2 under
`mpiexec -n 4`, stages driven by messages. What rounding does by itself is shown by plain PyTorch
with `clip_grad_norm_` as it is, whose norm is less exact; what chance does, by plain PyTorch with
other seeds. TEXT holds `train*` and `valid*` as `tools/preprocess_data.py` reads them. WORK keeps
finished runs: started again, the tool goes on. Writes README.md, results.json and
figure.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.errors import PeerError, SparsetronError
from megatron.metrics.logger import JSONL
from tools.bench.axonn_validation.page import OURS, PLAIN, SEEDS, STOCK, as_markdown
from tools.bench.axonn_validation.plain_training import LossCurve, train
from tools.bench.axonn_validation.plot import write_plot
from tools.bench.common.netlab import Network, find_mpiexec
from tools.bench.common.page_files import read_results, write_page
from tools.bench.common.rows import records
from tools.bench.common.training_runs import REPO, is_finished
from tools.studies.text_data import prepare

VOCABULARY = 8192
"""Entries of the tokenizer."""
RANKS, STAGES = 4, 2
EXTRA_SEEDS = (1, 2)
"""Seeds of further runs of plain PyTorch, besides the seed of the study."""


@dataclass(frozen=True, kw_only=True)
class ValidationStudy:
    """The settings that all runs share. `data` None means mock data."""

    layers: int = 6
    hidden: int = 320
    heads: int = 10
    sequence: int = 128
    batch: int = 8
    steps: int = 300
    warm_up: int = 30
    evaluated: int = 32
    seed: int = 1234
    data: Path | None = None

    def flags(self, *, seed: int | None = None, micro_batch: int = 1) -> list[str]:
        """Return the flags of `pretrain_gpt.py`."""
        values: dict[str, object] = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "seq-length": self.sequence,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "seed": self.seed if seed is None else seed,
            "micro-batch-size": micro_batch,
            "global-batch-size": self.batch,
            "train-iters": self.steps,
            "lr": "1e-3",
            "min-lr": "1e-4",
            "lr-decay-style": "cosine",
            "lr-warmup-iters": self.warm_up,
            "weight-decay": 0.1,
            "clip-grad": 1.0,
            "eval-iters": self.evaluated,
            "eval-interval": self.steps,
            "device": "cpu",
        }
        if self.data is not None:
            values["train-data-path"] = self.data / "train_text_document"
            values["valid-data-path"] = self.data / "valid_text_document"
            values["tokenizer-type"] = "HuggingFaceTokenizer"
            values["tokenizer-model"] = self.data / "tokenizer.json"
        flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        return flags if self.data is not None else [*flags, "--mock-data"]


SMALL = ValidationStudy(layers=2, hidden=32, heads=2, sequence=16, steps=8, warm_up=2, evaluated=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        if options.redraw is not None:
            _write(read_results(options.redraw), options.redraw)
            return 0
        torch.set_num_threads(options.threads)
        if options.smoke:
            with tempfile.TemporaryDirectory() as work:
                _write(measured(SMALL, Path(work)), options.out)
        else:
            find_mpiexec()  # before hours of anything else
            data = prepare(options.text_folder, options.work / "data", vocabulary=VOCABULARY)
            _write(measured(ValidationStudy(data=data), options.work), options.out)
    except SparsetronError as error:
        print(f"axonn_validation: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measured(study: ValidationStudy, work: Path) -> dict[str, Any]:
    """Return the losses of all runs, and the settings of the study."""
    curves: dict[str, LossCurve] = {PLAIN: _plain(study, work, "plain")}
    curves[OURS] = _ours(study, work / "axonn")
    curves[STOCK] = _plain(study, work, "stock", fp32_norm=True)
    for seed in EXTRA_SEEDS:
        name = SEEDS.format(seed=seed)
        curves[name] = _plain(study, work, f"seed{seed}", seed=seed)
    values = vars(study) | {"data": None}
    return {
        "study": values,
        "cores": os.cpu_count(),
        "curves": {name: vars(curve) for name, curve in curves.items()},
    }


def _plain(
    study: ValidationStudy,
    work: Path,
    name: str,
    *,
    fp32_norm: bool = False,
    seed: int | None = None,
) -> LossCurve:
    """Return a run of plain PyTorch, from `work` if it was finished there before."""
    flags = study.flags(seed=seed)
    asked = {"flags": flags, "fp32_norm": fp32_norm}
    path = work / f"{name}.json"
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["asked"] == asked:
            return LossCurve(**kept["curve"])

    def tell(step: int, loss: float) -> None:
        if step % 50 == 0 or step == study.steps:
            print(f"{name}: step {step}, loss {loss:.6f}", flush=True)

    curve = train(flags, micro_batch=study.batch, fp32_norm=fp32_norm, after_step=tell)
    temporary = path.with_name(f".{path.name}.tmp")
    work.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps({"asked": asked, "curve": vars(curve)}), encoding="utf-8")
    os.replace(temporary, path)
    return curve


def _ours(study: ValidationStudy, folder: Path) -> LossCurve:
    """Start or resume our run, and return its losses."""
    flags = study.flags()
    flags += ["--pipeline-model-parallel-size", str(STAGES), "--pipeline-schedule"]
    flags += ["message-driven", "--log-interval", str(max(1, study.steps // 6))]
    flags += ["--save-interval", str(study.steps // 2), "--run-dir", str(folder)]
    if not is_finished(folder, flags, RANKS):
        program = [str(REPO / "pretrain_gpt.py"), *flags]
        console = folder.with_suffix(".txt")
        console.parent.mkdir(parents=True, exist_ok=True)
        print(f"{folder.name}: trains; its words go to {console}", flush=True)
        with open(console, "ab") as stream:
            command = Network(ranks=RANKS).mpi_command(program, folder=folder)
            done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT)
        if done.returncode:
            # A smoke test's folder is gone when its reader comes to look.
            print(console.read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
            raise PeerError(f"mpiexec ended with exit code {done.returncode}; see {console}")
    return curve_of(folder, study.steps)


def curve_of(folder: Path, steps: int) -> LossCurve:
    """Return the losses of a finished run of ours, from its folder."""
    losses: dict[int, float] = {}
    valid: dict[int, float] = {}
    for values in records(folder / JSONL):
        if "lm_loss" in values:
            losses[values["iteration"]] = float(values["lm_loss"])
        elif "valid_loss" in values:
            valid[values["iteration"]] = float(values["valid_loss"])
    assert sorted(losses) == list(range(1, steps + 1)), "it is finished"
    return LossCurve(losses=[losses[step] for step in sorted(losses)], valid_loss=valid[steps])


def _write(found: dict[str, Any], folder: Path | None) -> None:
    def draw(path: Path) -> bool:
        return write_plot(path, found["curves"])

    print(text := as_markdown(found))
    write_page(folder, text=text, values=found, draw=draw, indent=None)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.axonn_validation.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--text-folder", type=Path, default=Path("data/wikipedia"), help="default: %(default)s")
    add("--work", type=Path, default=Path("runs/axonn_validation"), help="default: %(default)s")
    add("--threads", type=int, default=1, help="of plain PyTorch; ranks of ours have one each")
    add("--out", type=Path, default=None, help="folder for the report")
    add("--redraw", type=Path, default=None, metavar="FOLDER", help="from the JSON that is there")
    add("--smoke", action="store_true", help="a small model, a few steps, mock data")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
