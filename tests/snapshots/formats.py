"""The texts that are compared with recorded ones, each made in an empty folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from safetensors import safe_open

from megatron.config import parse, resolve, to_yaml
from megatron.config.fields import FieldSpec, specs_of
from megatron.config.gpt import SECTIONS
from megatron.config.megatron_flags import MEGATRON_NAMES
from pretrain_gpt import GRADIENT_PATHS
from tests import program
from tests.config.helpers import task_of
from tests.data.pairs import write_pair
from tests.snapshots.errors import errors
from tests.sweep.asking import LAUNCHERS
from tests.tools.runs import make_model_run

REPO = Path(__file__).resolve().parents[2]
GPT2 = "--vocab-size 60"
LLAMA = (
    "--vocab-size 60 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 2"
)
RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data "
    "--vocab-size 24 --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-2 "
    "--eval-iters 1 --eval-interval 2 --log-interval 2 --timing-log-level 2 --device cpu "
    "--log-params-norm --log-num-zeros-in-grad"
)

PATHS = {
    "dense": "",
    "samo+radius": "--samo-sparsity 0.5 --radius-interval 2 --radius-start-iter 2",
}
"""The runs whose files are described: the second has what gradient paths add."""


def flags(folder: Path) -> str:
    """Every flag with its section, kind, default and choices, then Megatron-LM's other flags."""
    sections: dict[str, type] = dict(SECTIONS)
    for path in GRADIENT_PATHS.values():
        sections |= path.sections
    lines: list[str] = []
    for name, section in sections.items():
        lines += [f"{name}:", *(f"  {_flag(spec)}" for spec in specs_of(section, name).values())]
    lines.append("gradient paths:")
    lines += [f"  {name}: {', '.join(path.sections)}" for name, path in GRADIENT_PATHS.items()]
    lines.append("other flags of Megatron-LM:")
    for name in MEGATRON_NAMES:
        facts = {k: v for k, v in dataclasses.asdict(name).items() if k not in ("flag", "reason")}
        told = " ".join(f"{key}={value!r}" for key, value in facts.items())
        lines.append(f"  {name.flag} {type(name).__name__} {told}".rstrip())
    return "\n".join(lines) + "\n"


def _flag(spec: FieldSpec) -> str:
    words = [f"{spec.name} {spec.flag} {spec.kind.__name__}"]
    if spec.many:
        words.append(f"x {spec.count or 'any'}")
    words.append("required" if spec.required else f"default {spec.default!r}")
    if spec.choices:
        words.append(f"one of {', '.join(spec.choices)}")
    if spec.within is not None:
        words.append(f"must be {spec.within}")
    words += ["or none"] * spec.optional + ["not saved"] * (not spec.saved)
    return ", ".join(words)


def configs(folder: Path) -> str:
    """Each file of configs/, resolved for as many ranks as its model needs at least."""
    texts: list[str] = []
    for path in sorted((REPO / "configs").glob("*.yaml")):
        config = parse(["--config", str(path)], paths=GRADIENT_PATHS, task=task_of(path))
        ranks = config.parallel.model_parallel_size
        texts.append(f"# {path.name}, {ranks} ranks\n{to_yaml(resolve(config, ranks))}")
    return "\n".join(texts)


def huggingface(folder: Path) -> str:
    """Files of exports, their configurations, and the names, dtypes and shapes of weights."""
    from tools import export_hf

    lines: list[str] = []
    for name, form in (("gpt2", GPT2), ("llama", LLAMA)):
        run, out = folder / f"run_{name}", folder / name
        make_model_run(run, form, vocab_size=60)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            assert export_hf.main([str(run), str(out)]) == 0
        lines += [f"{name}: {' '.join(sorted(path.name for path in out.iterdir()))}"]
        lines += (out / "config.json").read_text(encoding="utf-8").splitlines()
        with safe_open(out / "model.safetensors", framework="numpy") as file:
            lines.append(f"metadata {json.dumps(file.metadata())}")
            for key in sorted(file.keys()):
                part = file.get_slice(key)
                lines.append(f"{key} {part.get_dtype()} {part.get_shape()}")
    return "\n".join(lines) + "\n"


def datasets(folder: Path) -> str:
    """Hashes of indexed pairs: from the writer in two dtypes, and from a corpus of text."""
    from tools import preprocess_data

    for name, dtype in (("uint16", "u2"), ("int32", "i4")):
        write_pair(folder / name, [3, 0, 5, 2], dtype=dtype)
    texts = ["the cat sat", "", "on a mat: \u00fc \u4e2d \U0001f600", "one dog\nsaw how"]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = f"--input {corpus} --output-prefix {folder / 'corpus'} --append-eod --workers 1"
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert preprocess_data.main([*command.split(), "--tokenizer-type", "ByteTokenizer"]) == 0
    lines = [
        f"{path.name} {path.stat().st_size} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(folder.iterdir())
        if path.suffix in (".bin", ".idx", ".json")
    ]
    return "\n".join(lines) + "\n"


def run_files(folder: Path) -> str:
    """Keys and types of the files of two runs that trained, evaluated, saved and ended."""
    lines: list[str] = []
    for number, (path, more) in enumerate(PATHS.items()):
        lines.append(f"--grad-path {path}")
        lines += _files_of_run(folder / f"run{number}", f"--grad-path {path} {more}")
    return "\n".join(lines) + "\n"


def _files_of_run(run: Path, more: str) -> list[str]:
    # A process of its own, since a run takes hold of signals and threads.
    argv = [*RUN.split(), *more.split(), "--run-dir", str(run)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = program.run(REPO / "pretrain_gpt.py", argv, env=environment, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    # The picture needs an optional package.
    lines = ["files:", *(f"  {name}" for name in sorted(files - {"loss.png"}))]
    for name in ("status.json", "environment.json"):
        values = json.loads((run / name).read_text(encoding="utf-8"))
        lines += [f"{name}:", *_keys(values, types=name == "status.json")]
    kinds: dict[str, dict[str, set[str]]] = {"start": {}, "step": {}, "evaluation": {}}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        of_kind = kinds["step" if "lm_loss" in row else "start" if "ranks" in row else "evaluation"]
        for key, value in row.items():
            of_kind.setdefault(key, set()).add(_kind(value))
    for kind, keys in kinds.items():
        lines.append(f"metrics.jsonl, {kind}:")
        lines += [f"  {key}: {' or '.join(sorted(types))}" for key, types in keys.items()]
    return lines


def _keys(values: Mapping[str, Any], *, types: bool, indent: str = "  ") -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        lines.append(f"{indent}{key}" + (f": {_kind(value)}" if types else ""))
        if isinstance(value, dict) and key not in ("packages", "job"):
            lines += _keys(value, types=types, indent=f"{indent}  ")
    return lines


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


SNAPSHOTS: dict[str, Callable[[Path], str]] = {
    "flags": flags,
    "configs": configs,
    "huggingface": huggingface,
    "datasets": datasets,
    "run_files": run_files,
    "errors": errors,
}
"""Snapshots by name, which is the name of the recorded file."""
