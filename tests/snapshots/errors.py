"""Answers to about seventy wrong inputs: exit code and stderr, in one process.

Values that argparse itself refuses by a list of choices are left out, because the message differs
between versions of Python.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from tests.data.pairs import write_pair
from tests.frozen.cases import FOLDER as FROZEN
from tests.frozen.cases import checkpoint_of
from tests.sweep.asking import LAUNCHERS
from tests.sweep.field_cases import BASE
from tests.sweep.worker import run

REPO = Path(__file__).resolve().parents[2]
DRY = " ".join(BASE)
"""A valid start that trains nothing; a wrong flag follows."""
UNTEXTED = " ".join(flag for flag in BASE if not flag.startswith(("--mock-data", "--vocab-size")))
"""The flags of a start without data."""

STARTS = (
    "--num-layers=0", "--num-layers=x", "--num-layers", "--lr=nan", "--lr=-1", "--seed=1.5",
    "--mock-data=maybe", "--adam-beta1=2", "--grad-path=no-such", "--lr-decay-style=WSD",
    "--device=tpu", "--split=1,2,x", "--hiden-size=3", "--no-such=1", "--grad-paht=dense",
    "train", "configs/gpt_tiny.yaml", "--resume", "--dtype=bf16", "--gradient-accumulation-steps=2",
    "--use-checkpoint-args", "--fp16 --bf16", "--loss-scale=2", "--hidden-size=33",
    "--micro-batch-size=3 --global-batch-size=4", "--tensor-model-parallel-size=3",
    "--pipeline-model-parallel-size=2", "--num-layers-per-virtual-pipeline-stage=1",
    "--lr-warmup-fraction=0.1 --lr-warmup-iters=1", "--train-samples=8", "--min-lr=1",
    "--samo-sparsity=0.5", "--grad-path=samo --samo-pruning=file",
    "--grad-path=radius --radius-start-iter=1 --radius-start-fraction=0.5",
    "--grad-path=topk --use-distributed-optimizer", "--grad-path=radius --radius-density=1.5",
    "--recompute-method=block", "--profile --profile-step-start=5 --profile-step-end=5",
    "--max-position-embeddings=8", "--load={folder}/missing", "--load={folder}/damaged",
    "--load={folder}/run --num-layers=3", "--run-dir=", "--config={folder}/missing.yaml",
    "--config={folder}/list.yaml", "--config={folder}/twice.yaml", "--config={folder}/typo.yaml",
)  # fmt: skip
"""Flags after the flags of `DRY`."""

OTHERS = (
    "pretrain_gpt",
    f"pretrain_gpt {UNTEXTED}",
    f"pretrain_gpt {UNTEXTED} --data-path={{folder}}/missing",
    f"pretrain_gpt {UNTEXTED} --vocab-size=64 --data-path={{folder}}/cut",
    f"pretrain_gpt {UNTEXTED} --vocab-size=20 --data-path={{folder}}/pair",
    "check_data {folder}/missing",
    "check_data {folder}/cut",
    "check_data {folder}/pair --vocab-size=20",
    "check_data {folder}/pair --vocab-size=x",
    "verify_checkpoint {folder}/missing",
    "verify_checkpoint {folder}/damaged",
    "verify_checkpoint {folder}/empty",
    "status {folder}/missing",
    "status {folder}/empty",
    "report {folder}/missing",
    "generate {folder}/missing",
    "generate {folder}/run --checkpoint-step=3",
    "generate {folder}/run --temperature=-1",
    "evaluate {folder}/run {folder}/missing.jsonl --task=lambada",
    "zero_shot {folder}/run --tasks-dir={folder}/missing --only=piqa,copa",
    "zero_shot {folder}/run --tasks-dir={folder}/missing --only=nli",
    "export_hf {folder}/run {folder}/run",
    "export_hf {folder}/damaged {folder}/out",
    "import_hf {folder}/missing {folder}/out",
    "import_hf {folder}/bert {folder}/out",
    "prune_checkpoint {folder}/run --sparsity=1 --output={folder}/masks.npz",
    "preprocess_data --input={folder}/missing --output-prefix={folder}/out "
    "--tokenizer-type=ByteTokenizer",
    "preprocess_data --input={folder}/odd.jsonl --output-prefix={folder}/out "
    "--tokenizer-type=ByteTokenizer --workers=1",
    "plan {folder}/missing.yaml",
    f"plan {DRY} --world-size=3 --tensor-model-parallel-size=2",
    f"simulate {DRY} --jitter=-1",
)
"""Command lines of tools, and starts with other flags."""


def errors(folder: Path) -> str:
    """Return the answer to each input."""
    _prepare(folder)
    lines = [*(f"pretrain_gpt {DRY} {flags}" for flags in STARTS), *OTHERS]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    told: list[str] = []
    with chdir(folder), patch.dict(os.environ, variables | {"COLUMNS": "100"}, clear=True):
        for line in lines:
            command, *argv = line.format(folder=folder).split()
            caught = StringIO()
            with redirect_stdout(StringIO()), redirect_stderr(caught):
                code = run(command, argv)
            answer = [f"  {text}" for text in caught.getvalue().splitlines()]
            short = line.replace(DRY, "DRY").replace(UNTEXTED, "UNTEXTED")
            told += [f"$ {short}", *answer, f"  exit code {code}"]
    text = "\n".join(told) + "\n"
    return text.replace(str(folder), "{folder}").replace(str(REPO), "{repo}")


def _prepare(folder: Path) -> None:
    """Write the damaged and the valid files that the inputs name."""
    for name in ("run", "damaged"):
        shutil.copytree(FROZEN / "dense", folder / name)
        for path in (folder / name, *(folder / name).rglob("*")):
            path.chmod(0o750 if path.is_dir() else 0o640)
    tensors = checkpoint_of(folder / "damaged") / "rank_00000.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    (folder / "empty").mkdir()
    for name in ("pair", "cut"):
        write_pair(folder / name, [30, 20])
    (folder / "cut.idx").write_bytes((folder / "cut.idx").read_bytes()[:-3])
    (folder / "list.yaml").write_text("[1, 2]\n")
    (folder / "twice.yaml").write_text("seed: 3\nseed: 4\n")
    (folder / "typo.yaml").write_text("training:\n  sead: 3\n")
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "odd.jsonl").write_text('{"text": "ok"}\n{"text": 3}\n')
