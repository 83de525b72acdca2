"""Mutations of real files, and the commands that read them.

Bits flip, and parts are cut off, doubled, swapped, or overwritten with zeros or another file. JSON
and YAML also change in structure and still parse. A seed determines all mutations.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from megatron.checkpoint.format import sign
from tests.sweep.asking import SweepCase
from tests.sweep.samples import Samples

OUT = "out"
"""Name of the output of commands."""
EACH = 4
"""Mutations of each target: 100 in all."""
Argv = Callable[[Samples], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file to mutate, below the folder of the samples, and the command that reads it.

    `codes`: correct exit codes, without 0 for a hashed file, of which any change must be refused.
    `structure`: language of structural mutations. `notes`: number of lines that may precede a
    refusal.
    """

    name: str
    file: str
    command: str
    argv: Argv
    codes: tuple[int, ...]
    structure: str = ""
    notes: int = 0

    def case(self, samples: Samples, *, about: str) -> SweepCase:
        """Return the case to run once the file is mutated."""
        return SweepCase(
            kind=self.name,
            command=self.command,
            argv=self.argv(samples),
            codes=self.codes,
            notes=self.notes,
            about=about,
        )


def _run(samples: Samples) -> tuple[str, ...]:
    return (str(samples.run),)


def _generate(samples: Samples) -> tuple[str, ...]:
    return (str(samples.run), "--max-new-tokens=2", "--prompt=the cat")


def _check_data(samples: Samples) -> tuple[str, ...]:
    return (str(samples.prefix), "--full")


def _import(samples: Samples) -> tuple[str, ...]:
    return (str(samples.exported), str(samples.folder / OUT))


def _preprocess(samples: Samples) -> tuple[str, ...]:
    return (
        f"--input={samples.text}", f"--output-prefix={samples.folder / OUT}", "--workers=1",
        "--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={samples.tokenizer}",
    )  # fmt: skip


def _evaluate(samples: Samples) -> tuple[str, ...]:
    return (str(samples.run), str(samples.task), "--task=lambada")


def _masks(samples: Samples) -> tuple[str, ...]:
    return (str(samples.masks),)


def _dry_run(samples: Samples) -> tuple[str, ...]:
    return ("--config", str(samples.run / "config.yaml"), "--dry-run")


def _finetune(samples: Samples) -> tuple[str, ...]:
    return (
        f"--config={samples.run / 'config.yaml'}", f"--run-dir={samples.folder / OUT}",
        f"--load={samples.run}", "--ckpt-step=4", "--dry-run",
    )  # fmt: skip


STEP = "run/checkpoints/step_00000004"
PAIR = "data/corpus_text_document"
TARGETS = (
    Target(name="manifest", file=f"{STEP}/manifest.json", command="verify_checkpoint", argv=_run,
           codes=(4,), structure="json"),
    Target(name="state of a manifest", file=f"{STEP}/manifest.json",
           command="pretrain_gpt", argv=_finetune, codes=(0, 4), structure="state"),
    Target(name="tensors", file=f"{STEP}/rank_00000.safetensors", command="verify_checkpoint",
           argv=_run, codes=(4,)),
    Target(name="tensors, to status", file=f"{STEP}/rank_00000.safetensors", command="status",
           argv=_run, codes=(0,)),
    # The step before it verifies, and is used.
    Target(name="manifest, to generate", file=f"{STEP}/manifest.json", command="generate",
           argv=_generate, codes=(0,)),
    Target(name="latest", file="run/checkpoints/latest", command="generate", argv=_generate,
           codes=(0,)),
    Target(name="run's config.yaml", file="run/config.yaml", command="pretrain_gpt", argv=_dry_run,
           codes=(0, 2, 3, 4), structure="yaml"),
    Target(name="run's config.yaml, to generate", file="run/config.yaml", command="generate",
           argv=_generate, codes=(0, 2, 3, 4), structure="yaml"),
    Target(name="status.json", file="run/status.json", command="status", argv=_run, codes=(0,),
           structure="json"),
    Target(name="status.json, to report", file="run/status.json", command="report", argv=_run,
           codes=(0, 2), structure="json"),
    Target(name="metrics.jsonl", file="run/metrics.jsonl", command="report", argv=_run,
           codes=(0, 2), structure="jsonl", notes=1),
    Target(name="metrics.jsonl, to status", file="run/metrics.jsonl", command="status", argv=_run,
           codes=(0,), structure="jsonl"),
    Target(name="environment.json", file="run/environment.json", command="report", argv=_run,
           codes=(0, 2), structure="json"),
    Target(name="run's config.yaml, to report", file="run/config.yaml", command="report", argv=_run,
           codes=(0, 2), structure="yaml"),
    Target(name=".bin", file=f"{PAIR}.bin", command="check_data", argv=_check_data, codes=(3,)),
    Target(name=".idx", file=f"{PAIR}.idx", command="check_data", argv=_check_data, codes=(3,)),
    Target(name="sidecar", file=f"{PAIR}.json", command="check_data", argv=_check_data,
           codes=(0, 3), structure="json"),
    Target(name="sidecar, to generate", file=f"{PAIR}.json", command="generate", argv=_generate,
           codes=(0, 3), structure="json"),
    Target(name="tokenizer.json", file="tokenizer.json", command="preprocess_data",
           argv=_preprocess, codes=(0, 2, 3), structure="json"),
    Target(name="tokenizer.json, to generate", file="tokenizer.json", command="generate",
           argv=_generate, codes=(0, 3), structure="json"),
    Target(name="masks", file="masks.npz", command="load_masks", argv=_masks, codes=(0, 3)),
    Target(name="text", file="corpus.jsonl", command="preprocess_data", argv=_preprocess,
           codes=(0, 3), structure="jsonl"),
    Target(name="task", file="task.jsonl", command="evaluate", argv=_evaluate, codes=(0, 3),
           structure="jsonl"),
    Target(name="exported config.json", file="exported/config.json", command="import_hf",
           argv=_import, codes=(0, 2, 3, 4), structure="json"),
    Target(name="exported weights", file="exported/model.safetensors", command="import_hf",
           argv=_import, codes=(0, 4)),
    Target(name="exported tokenizer.json", file="exported/tokenizer.json", command="import_hf",
           argv=_import, codes=(0, 2, 3), structure="json"),
)  # fmt: skip


# ---- bytes -------------------------------------------------------------------------------------


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 4))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _flip_ahead(data: bytes, draw: random.Random) -> bytes:
    """Flip a byte in the first 64 bytes, where headers lie."""
    changed = bytearray(data)
    changed[draw.randrange(min(64, len(changed)))] = draw.randrange(256)
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def _behead(data: bytes, draw: random.Random) -> bytes:
    return data[draw.randrange(1, len(data)) :]


def _extend(data: bytes, draw: random.Random) -> bytes:
    return data + draw.choice((b"\0", b"\0" * 4096, b"}", data, draw.randbytes(64)))


def _zero(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.choice((1, 8, 512)))
    return data[:start] + bytes(stop - start) + data[stop:]


def _swap(data: bytes, draw: random.Random) -> bytes:
    half = len(data) // 2
    return data[half:] + data[:half]


def _insert(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    text = draw.choice((b"\0", b"\n", b'"', b"{", b"\xff\xfe", b"\x1b[31m", b"9" * 5000))
    return data[:place] + text + data[place:]


def _replace(data: bytes, draw: random.Random) -> bytes:
    return draw.choice(OTHERS)


OTHERS = (
    b"", b"\0", b"\0" * 100_000, b"\xff" * 64, b"{}", b"[]", b"null", b"3", b'"text"', b"\n",
    b"[" * 100_000, b'{"a":' * 50_000, b"PK\x05\x06" + bytes(18), b"\x89PNG\r\n\x1a\n",
    b"\x80\x04\x95K\x00\x00\x00.", b"MMIDIDX\x00\x00" + bytes(40), b"<html></html>", b"9" * 100_000,
    b"\xff" * 8 + b"{}", b"#!/bin/sh\nexit 3\n",
)  # fmt: skip
BYTES = (_flip, _flip_ahead, _cut, _behead, _extend, _zero, _swap, _insert, _replace)

# ---- structure ---------------------------------------------------------------------------------

VALUES: tuple[str, ...] = (
    "null", "true", "0", "-1", "1.5", '""', '"x"', "[]", "{}", "[1]", '{"a": 1}', "1e999", "NaN",
    "9" * 5000, str(10**30), str(2**63), "-" + "9" * 30, '"\\u001b[31mred"', '"a\\nb"', '"\\ud800"',
    '"' + "n" * 5000 + '"', '"/proc/self/mem"', '"../../x"', '"\\u0000"', "[" * 400 + "]" * 400,
)  # fmt: skip
"""JSON values that replace others; some are legal in some places."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a document; a long list yields only its ends."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*path, key))
    elif isinstance(value, list):
        for number in {0, 1, len(value) - 1} & set(range(len(value))):
            yield from _places(value[number], (*path, number))


_MARK = "\ue000"


def _json(text: str, draw: random.Random) -> str:
    """Return the document with a value replaced, or a key removed, doubled or renamed."""
    document = json.loads(text)
    found = [path for path in _places(document) if path]
    # Prefer values near the top over the content of long tables.
    path = draw.choice([p for p in found if len(p) <= draw.choice((1, 2, 3, 9))] or found)
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    deed = draw.randrange(8)
    if deed == 0:
        del parent[path[-1]]
    elif deed == 1 and isinstance(parent, dict):
        parent[f"{path[-1]}{_MARK}"] = 3
        twice = json.dumps(document)
        return twice.replace(json.dumps(_MARK)[1:-1], "")
    else:
        parent[path[-1]] = _MARK
    return json.dumps(document).replace(json.dumps(_MARK), draw.choice(VALUES))


def _jsonl(text: str, draw: random.Random) -> str:
    lines = text.splitlines()
    number = draw.randrange(len(lines))
    lines[number] = _json(lines[number], draw)
    return "\n".join(lines) + "\n"


def _yaml(text: str, draw: random.Random) -> str:
    """Return a YAML file with a line changed, removed, doubled or moved."""
    lines = text.splitlines()
    number = draw.choice([n for n, line in enumerate(lines) if ":" in line])
    line = lines[number]
    deed = draw.randrange(8)
    if deed == 0:
        del lines[number]
    elif deed == 1:
        lines.insert(number, line)
    elif deed == 2:
        lines[number] = f"    {line}"
    elif deed == 3:
        lines[number] = line.lstrip().replace(":", "")
    else:
        lines[number] = re.sub(r":.*", lambda _: f": {draw.choice(VALUES)}", line)
    return "\n".join(lines) + "\n"


def _state(text: str, draw: random.Random) -> str:
    """Return a signed manifest of which a value of `state` is another one."""
    document = json.loads(text)
    del document["sha256"]
    document["state"] = _MARK
    state = _json(json.dumps(json.loads(text)["state"]), draw)
    return sign(json.dumps(document).replace(json.dumps(_MARK), state).encode()[1:]).decode()


STRUCTURES = {"state": _state, "json": _json, "jsonl": _jsonl, "yaml": _yaml}


# ---- cases -------------------------------------------------------------------------------------


def mutations(samples: Samples, *, seed: int) -> Iterator[SweepCase]:
    """Yield `EACH` mutations of every target; each stays on disk until the next is requested.

    Half of the mutations are structural where the target has a structure. The others cycle through
    `BYTES` across targets, so that each kind occurs equally often.
    """
    kinds = cycle(BYTES)
    for target in TARGETS:
        draw = random.Random(f"{seed} {target.name}")
        path = samples.folder / target.file
        good = path.read_bytes()
        for number in range(EACH):
            bad = good
            if target.structure and number % 2:
                how = target.structure
                while bad == good:
                    text = STRUCTURES[how](good.decode(), draw)
                    bad = text.encode("utf-8", "surrogatepass")
            else:
                change = next(kinds)
                how = change.__name__.strip("_")
                while bad == good:
                    bad = change(good, draw)
            path.write_bytes(bad)
            try:
                yield target.case(samples, about=f"{how} {number}")
            finally:
                path.write_bytes(good)
                remove_outputs(samples)


def remove_outputs(samples: Samples) -> None:
    """Remove what the commands wrote."""
    shutil.rmtree(samples.folder / OUT, ignore_errors=True)
    for path in samples.folder.glob(f"{OUT}_*"):
        path.unlink()
