"""Small real files of every kind that the commands read, made by the commands themselves."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.limits import LIMIT
from tests.sweep.asking import LAUNCHERS, REPO, SweepCase, Worker

WORDS = "the cat sat on a mat and one dog saw how it ran over there with all its might".split()
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--train-iters 4 --save-interval 2 --split 80,20,0"
)


@dataclass(frozen=True)
class Samples:
    """Paths of the sample files; all are valid, and every command accepts them."""

    folder: Path

    @property
    def text(self) -> Path:
        """Path of JSON lines with a text each."""
        return self.folder / "corpus.jsonl"

    @property
    def task(self) -> Path:
        """Path of JSON lines for tools/evaluate.py."""
        return self.folder / "task.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def prefix(self) -> Path:
        """Prefix of a .bin/.idx pair with its sidecar."""
        return self.folder / "data" / "corpus_text_document"

    @property
    def run(self) -> Path:
        """Folder of a finished run with two checkpoints."""
        return self.folder / "run"

    @property
    def masks(self) -> Path:
        return self.folder / "masks.npz"

    @property
    def exported(self) -> Path:
        """Folder of the model in Hugging Face's format."""
        return self.folder / "exported"


def make_samples(folder: Path, worker: Worker) -> Samples:
    """Make all sample files."""
    samples = Samples(folder)
    draw = random.Random(7)
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(12, 40))) for _ in range(120)]
    samples.text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = [{"text": "the cat sat on a mat"}, {"context": "one dog", "continuation": "saw"}]
    samples.task.write_text("".join(json.dumps(line) + "\n" for line in task))
    (folder / "data").mkdir()
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model")
    _make(
        worker, "train_tokenizer", "--input", samples.text, "--output", samples.tokenizer,
        "--vocab-size", 300,
    )  # fmt: skip
    _make(
        worker, "preprocess_data", "--input", samples.text, "--output-prefix",
        folder / "data" / "corpus", *tokenizer, samples.tokenizer, "--append-eod", "--workers", 1,
    )  # fmt: skip
    _train(samples)
    _make(worker, "prune_checkpoint", samples.run, "--sparsity", "0.5", "--output", samples.masks)
    _make(worker, "export_hf", samples.run, samples.exported)
    return samples


def _make(worker: Worker, command: str, *argv: object) -> None:
    case = SweepCase(kind="sample", command=command, argv=tuple(map(str, argv)), codes=(0,))
    answer = worker.ask(case)
    assert answer.code == 0, f"{case}: {answer.why}{answer.err}"


def _train(samples: Samples) -> None:
    """Train in a separate process, since training installs signal handlers and threads."""
    import os

    command = [sys.executable, str(REPO / "pretrain_gpt.py"), *FLAGS.split()]
    command += ["--data-path", str(samples.prefix), "--run-dir", str(samples.run)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "WANDB_MODE": "offline"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
