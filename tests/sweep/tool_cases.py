"""Hand-written wrong inputs of each tool: its flags, and paths of the wrong kind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.sweep.asking import SweepCase
from tests.sweep.field_cases import BASE
from tests.sweep.samples import Samples

CONFIGURATION, DATA, CHECKPOINT = (2,), (3,), (4,)
HUGE = str(10**30)
NO_COUNTS = ("0", "-1", "x", "", "1.5", "nan", "1e3", "-9" * 20, "٣", "1_0", HUGE)
"""Values that no flag with a count accepts."""

OUTPUTS = ("through a file", "below a loop", "long name", "long path")
"""Odd paths that cannot be written to."""


def odd_paths(folder: Path) -> dict[str, str]:
    """Return paths that cannot be read as a file or a folder, by kind."""
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text("a file\n")
    (folder / "empty folder").mkdir(exist_ok=True)
    for link, target in (("loop", "loop2"), ("loop2", "loop"), ("dangling", "nowhere")):
        if not (folder / link).is_symlink():
            (folder / link).symlink_to(target)
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
    return {
        "missing": str(folder / "missing"),
        "through a file": str(folder / "file" / "below"),
        "empty folder": str(folder / "empty folder"),
        "loop of links": str(folder / "loop"),
        "below a loop": str(folder / "loop" / "below"),
        "dangling link": str(folder / "dangling"),
        "long name": str(folder / ("n" * 300)),
        "long path": str(folder) + "/n" * 2500,
        "pipe": str(folder / "pipe"),
        "device": "/dev/zero",
        "control character": str(folder / "a\x1b[31mred"),
        "line break": str(folder / "two\nlines"),
        "no UTF-8": str(folder / "\udcff\udcfe"),
        "empty": "",
    }


def _each(
    kind: str, command: str, base: Sequence[object], codes: tuple[int, ...], *wrong: Sequence[str]
) -> Iterator[SweepCase]:
    """Yield a case for each list of wrong flags, after the valid flags."""
    start = tuple(map(str, base))
    for more in wrong:
        yield SweepCase(kind=kind, command=command, argv=(*start, *more), codes=codes)


def _values(
    command: str, base: Sequence[object], flag: str, *values: str, codes: tuple[int, ...] = (2,)
) -> Iterator[SweepCase]:
    """Yield a case for each value that a flag does not accept."""
    for value in values:
        argv = (*map(str, base), f"{flag}={value}")
        yield SweepCase(kind=f"{command}: flags", command=command, argv=argv, codes=codes)


def _paths(
    command: str, before: Sequence[object], after: Sequence[object], paths: dict[str, str],
    codes: tuple[int, ...], *, without: Sequence[str] = (),
) -> Iterator[SweepCase]:  # fmt: skip
    """Yield a case for each odd path at one place of a command line."""
    for what, path in paths.items():
        if what not in without:
            argv = (*map(str, before), path, *map(str, after))
            yield SweepCase(kind=f"{command}: paths", command=command, argv=argv, codes=codes)


def tool_cases(folder: Path, samples: Samples) -> Iterator[SweepCase]:
    """Yield all cases; commands write below `folder`."""
    paths = odd_paths(folder / "odd")
    for make in (
        _start, _launch, _check_data, _verify, _status, _report, _generate, _evaluate, _export,
        _import, _prune, _train_tokenizer, _preprocess, _plan, _simulate, _others,
    ):  # fmt: skip
        yield from make(folder, samples, paths)


def _start(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    """Yield dry runs of pretrain_gpt.py."""
    yield SweepCase(kind="pretrain_gpt: flags", command="pretrain_gpt", argv=(), codes=(2,))
    for bare in (
        "configs/gpt_tiny.yaml",
        "train",
        "--",
        "-",
        "-x",
        "---lr",
        "--=",
        "--lr=",
        "－－lr",
    ):
        argv = (*BASE, bare)
        yield SweepCase(kind="pretrain_gpt: flags", command="pretrain_gpt", argv=argv, codes=(2,))
    for pair in PAIRS:
        argv = (*BASE, *pair.split())
        yield SweepCase(
            kind="pretrain_gpt: refused pairs", command="pretrain_gpt", argv=argv, codes=(2,)
        )
    config = [a for a in BASE if not a.startswith("--config")]
    yield from _paths("pretrain_gpt", [*config, "--config"], [], paths, CONFIGURATION)
    data = [a for a in BASE if not a.startswith(("--mock-data", "--vocab-size"))]
    files = {"file": str(folder / "odd" / "file"), **paths}
    no_text = ("control character", "line break", "empty", "no UTF-8")
    for flags, code in (
        (("--data-path",), 3),
        (("--tokenizer-type=HuggingFaceTokenizer", "--data-path", str(samples.prefix),
          "--tokenizer-model"), 3),
        (("--mock-data", "--vocab-size=64", "--grad-path=samo", "--samo-pruning=file",
          "--samo-mask-file"), 3),
        (("--mock-data", "--vocab-size=64", "--load"), 4),
    ):  # fmt: skip
        for what, path in files.items():
            codes = (2, code) if what in no_text or "path" in what else (code,)
            if what == "empty folder" and code == 4:
                codes = (0, 4)
            argv = (*data, *flags, path)
            yield SweepCase(
                kind="pretrain_gpt: paths", command="pretrain_gpt", argv=argv, codes=codes
            )
    text = "".join(f"{a[2:].replace('-', '_').replace('=', ': ')}\n" for a in BASE)
    for number, content in enumerate(ODD_YAML):
        path = folder / f"odd_{number}.yaml"
        path.write_bytes(content if isinstance(content, bytes) else f"{text}{content}".encode())
        yield SweepCase(
            kind="pretrain_gpt: yaml", command="pretrain_gpt", argv=("--config", str(path)),
            codes=(2,),
        )  # fmt: skip


def _launch(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    """Yield cases with environment variables of launchers."""
    odd = ("x", "-1", "1.5", "٣", "²", "nan", " ", "9" * 5000, "0x1", "\x1b[31m")
    good = {"RANK": "0", "WORLD_SIZE": "1"}
    environments: list[dict[str, str]] = [{"RANK": "0"}, {"WORLD_SIZE": "1"}]
    environments += [good | {"RANK": text} for text in (*odd, "", "1", "7")]
    environments += [good | {"WORLD_SIZE": text} for text in (*odd, "", "0")]
    environments += [good | {"MASTER_PORT": t} for t in (*odd, "0", "65536", "99999", str(2**63))]
    environments += [good | {"LOCAL_RANK": text} for text in odd]
    environments += [good | {"LOCAL_WORLD_SIZE": text} for text in odd]
    environments += [{"OMP_NUM_THREADS": t} for t in ("abc", "0", "-1", "1.5", "٣", "99999999")]
    for names in (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("PMI_RANK", "PMI_SIZE")):
        environments += [{names[0]: text, names[1]: "2"} for text in (*odd, "2")]
        environments += [{names[0]: "0", names[1]: text} for text in odd]
    for environment in environments:
        yield SweepCase(
            kind="pretrain_gpt: environment", command="pretrain_gpt", argv=BASE, codes=(2,),
            env=environment,
        )  # fmt: skip


def _check_data(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    yield from _each("check_data: flags", "check_data", (), (2,), (), ("a", "b"), ("--full",))
    yield from _each(
        "check_data: flags", "check_data", [samples.prefix], (2,), ["--vocabsize", "3"]
    )
    yield from _values("check_data", [samples.prefix], "--vocab-size", *NO_COUNTS)
    yield from _values("check_data", [samples.prefix], "--vocab-size", "1", "299", codes=(3,))
    yield from _values("check_data", [samples.prefix], "--vocab-size", HUGE, codes=(2, 3))
    yield from _values("check_data", [samples.prefix], "--eod", "-5", "x", "", "1.5", HUGE)
    yield from _paths("check_data", [], ["--full"], paths, DATA)
    for name, change in (("half", ".bin"), ("other half", ".idx")):
        (folder / f"{name}{change}").write_bytes(b"")
        yield from _each("check_data: paths", "check_data", [folder / name], (3,), ())


def _verify(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    kind, command = "verify_checkpoint: paths", "verify_checkpoint"
    yield from _each("verify_checkpoint: flags", command, (), (2,), (), ("a", "b"), ("--loud", "x"))
    yield from _paths(command, [], [], paths, CHECKPOINT, without=["empty"])
    for place in ("data", "exported", "corpus.jsonl", "run/config.yaml", "run/checkpoints/latest"):
        yield from _each(kind, command, [samples.folder / place], (4,), ())


def _status(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    yield from _each("status: flags", "status", (), (2,), (), ("a", "b"), ("--jso", "x"))
    yield from _paths("status", [], [], paths, CONFIGURATION, without=["empty"])
    for place in ("data", "exported", "corpus.jsonl"):
        yield from _each("status: paths", "status", [samples.folder / place], (2,), ())


def _report(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    kind = "report: flags"
    yield from _each(kind, "report", (), (2,), (), ("--outptu", "x"))
    yield from _each(kind, "report", [samples.run], (2,), ["--assert-equal"])
    yield from _values("report", [samples.run], "--tolerance", "x", "", "1e", "nan", "-1", "inf")
    yield from _paths("report", [], [], paths, CONFIGURATION, without=["empty"])
    yield from _paths("report", [samples.run], [], paths, CONFIGURATION, without=["empty"])
    for what in ("through a file", "loop of links", "below a loop", "long name", "long path",
                 "pipe", "device"):  # fmt: skip
        yield from _each("report: paths", "report", [samples.run], (2,), ["--output", paths[what]])


NO_TOKENIZER = (
    ("--tokenizer-type=No",), ("--tokenizer-type=",), ("--tokenizer-model=x",), ("--vocab-file=x",),
    ("--merge-file=x",), ("--tokenizer-type=HuggingFaceTokenizer",),
    ("--tokenizer-type=GPT2BPETokenizer",),
    ("--tokenizer-type=GPT2BPETokenizer", "--vocab-file=x"),
    ("--tokenizer-type=SentencePieceTokenizer",),
    ("--tokenizer-type=ByteTokenizer", "--tokenizer-model=x"),
)  # fmt: skip


def _of_runs(
    command: str, samples: Samples, paths: dict[str, str], after: Sequence[object], step: str
) -> Iterator[SweepCase]:
    """Yield the common cases of generate, evaluate and export: run, step, tokenizer."""
    good = [samples.run, *after]
    codes = (2, 4)
    yield from _paths(command, [], after, paths, codes, without=["empty"])
    for place in ("data", "exported", "corpus.jsonl", "run/checkpoints/latest", "run/config.yaml"):
        yield from _each(f"{command}: paths", command, [samples.folder / place, *after], codes, ())
    yield from _values(command, good, step, "x", "", "1.5", "nan")
    yield from _values(command, good, step, "3", "99", "-1", HUGE, codes=codes)
    yield from _each(f"{command}: flags", command, good, CONFIGURATION, *NO_TOKENIZER)
    files = {
        "text": str(samples.text),
        "run": str(samples.run),
        "index": f"{samples.prefix}.idx",
        **paths,
    }
    for what, path in files.items():
        if what not in ("empty", "no UTF-8"):
            for flags in (
                ("--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={path}"),
                ("--tokenizer-type=SentencePieceTokenizer", f"--tokenizer-model={path}"),
                ("--tokenizer-type=GPT2BPETokenizer", f"--vocab-file={path}",
                 f"--merge-file={path}"),
            ):  # fmt: skip
                yield from _each(f"{command}: tokenizer", command, good, (2, 3), flags)


def _generate(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    good = [samples.run, "--max-new-tokens=3"]
    yield from _each("generate: flags", "generate", (), (2,), (), ("a", "b"), ("--promt", "x"))
    yield from _of_runs("generate", samples, paths, ["--max-new-tokens=3"], "--checkpoint-step")
    for flag in ("--max-new-tokens", "--num-samples"):
        yield from _values("generate", good, flag, *NO_COUNTS, str(10**11), str(2**63 - 1), HUGE)
    yield from _values("generate", good, "--num-samples", str(10**8))
    yield from _values("generate", good, "--temperature", "0", "-1", "nan", "inf", "x", "", "1e999")
    yield from _values("generate", good, "--top-k", "-1", "x", "1.5", "")
    yield from _values("generate", good, "--seed", "-1", "x", "1.5", "", HUGE, str(2**62))
    yield from _each("generate: flags", "generate", good, (2, 3), ["--prompt=\udcff"])
    # Not the model's vocabulary: the run was trained with 300 entries of its own file.
    yield from _each(
        "generate: tokenizer", "generate", good, (2, 3), ["--tokenizer-type=ByteTokenizer"]
    )


def _evaluate(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    good = [samples.run, samples.task, "--task=lambada"]
    kind = "evaluate: flags"
    yield from _each(kind, "evaluate", (), (2,), (), ("a",), ("a", "b"), ("a", "b", "--task=x"))
    yield from _of_runs("evaluate", samples, paths, good[1:], "--checkpoint-step")
    for flag in ("--batch-size", "--limit"):
        yield from _values("evaluate", good, flag, *NO_COUNTS)
    without = ["empty", "empty folder"]
    after = ["--task=lambada"]
    yield from _paths("evaluate", [samples.run], after, paths, (2, 3), without=without)
    for number, (task, line) in enumerate(ODD_TASKS):
        path = folder / f"task_{number}.jsonl"
        path.write_bytes(line)
        yield from _each(
            "evaluate: data", "evaluate", [samples.run, path], (3,), [f"--task={task}"]
        )


def _export(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    yield from _each("export_hf: flags", "export_hf", (), (2,), (), ("a",), ("a", "b", "--dtyp=x"))
    yield from _of_runs("export_hf", samples, paths, [folder / "out"], "--step")
    good = [samples.run, folder / "out2"]
    yield from _values("export_hf", good, "--dtype", "int8", "", "FLOAT32")
    for what in (*OUTPUTS, "loop of links", "pipe", "device"):
        yield from _each("export_hf: paths", "export_hf", [samples.run, paths[what]], (2,), ())
    yield from _each("export_hf: paths", "export_hf", [samples.run, samples.run], (2,), ())


def _import(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    out = folder / "imported"
    yield from _each("import_hf: flags", "import_hf", (), (2,), (), ("a",), ("a", "b", "--x"))
    yield from _paths("import_hf", [], [out], paths, CONFIGURATION, without=["empty"])
    yield from _values("import_hf", [samples.exported, out], "--seq-length", *NO_COUNTS, HUGE)
    yield from _values("import_hf", [samples.exported, out], "--seq-length", "17", str(2**63 - 1))
    for what in (*OUTPUTS, "loop of links", "pipe", "device"):
        yield from _each("import_hf: paths", "import_hf", [samples.exported, paths[what]], (2,), ())
    yield from _each("import_hf: paths", "import_hf", [samples.exported, samples.run], (2,), ())
    yield from _each("import_hf: paths", "import_hf", [samples.run, out], (2,), ())
    for number, content in enumerate(ODD_HF):
        source = folder / f"hf_{number}"
        source.mkdir()
        (source / "config.json").write_bytes(content)
        yield from _each("import_hf: data", "import_hf", [source, out], (2, 3), ())
    for number, (name, content) in enumerate(ODD_WEIGHTS):
        source = folder / f"weights_{number}"
        source.mkdir()
        (source / "config.json").write_bytes((samples.exported / "config.json").read_bytes())
        (source / name).write_bytes(content)
        # An index is an ordinary JSON file.
        yield from _each("import_hf: data", "import_hf", [source, out], (3, 4), ())


def _prune(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    command, out = "prune_checkpoint", folder / "new.npz"
    good = [samples.run, "--sparsity=0.5", f"--output={out}"]
    yield from _each(
        "prune_checkpoint: flags", command, (), (2,), (), ("a",), ("a", "--sparsity=0.5"),
        ("a", f"--output={out}"), ("a", "--sparsity=0.5", f"--output={out}", "--skope=tensor"),
    )  # fmt: skip
    yield from _values(
        command, good, "--sparsity", "1", "-0.1", "x", "", "nan", "inf", "1/0", "2/1",
        "1e999999999",
        "1e-999999999", "９", "9" * 5000,
    )  # fmt: skip
    yield from _values(command, good, "--scope", "all", "", "TENSOR")
    yield from _values(command, good, "--step", "x", "", "1.5")
    yield from _values(command, good, "--step", "3", "-1", HUGE, codes=(2, 4))
    yield from _paths(command, [], good[1:], paths, CHECKPOINT, without=["empty"])
    for what in (*OUTPUTS, "pipe", "device", "empty folder"):
        argv = [samples.run, "--sparsity=0.5", "--output", paths[what]]
        yield from _each("prune_checkpoint: paths", command, argv, (2,), ())
    yield from _each(
        "prune_checkpoint: paths", command, [*good, f"--output={samples.masks}"], (2,), ()
    )


def _train_tokenizer(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    command, out = "train_tokenizer", f"--output={folder / 'new.json'}"
    good = [f"--input={samples.text}", "--vocab-size=280", out, "--overwrite"]
    yield from _each("train_tokenizer: flags", command, (), (2,), (), ("--input=a",), (out,))
    sizes = ("256", "99999999999", str(2**63 - 1))
    yield from _values(command, good, "--vocab-size", *NO_COUNTS, *sizes, HUGE)
    yield from _values(command, good, "--max-bytes", *NO_COUNTS)
    yield from _values(command, good, "--text-unit", "page", "")
    yield from _values(command, good, "--json-keys", "title", codes=(3,))
    yield from _paths(command, ["--input"], good[1:], paths, (2, 3))
    for what in (*OUTPUTS, "empty folder"):
        argv = [*good, f"--output={paths[what]}"]
        yield from _each("train_tokenizer: paths", command, argv, (2, 3), ())
    for number, content in enumerate(ODD_TEXTS):
        path = folder / f"raw_{number}.jsonl"
        path.write_bytes(content)
        argv = [f"--input={path}", *good[1:]]
        yield from _each("train_tokenizer: data", command, argv, (3,), ())


def _preprocess(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    command, out = "preprocess_data", f"--output-prefix={folder / 'new'}"
    good = [
        f"--input={samples.text}",
        out,
        "--tokenizer-type=ByteTokenizer",
        "--workers=1",
        "--overwrite",
    ]
    kind = "preprocess_data: flags"
    yield from _each(kind, command, (), (2,), (), ("--input=a",), (out,), ("--imput=a",))
    for flag in ("--workers", "--log-interval", "--partitions"):
        yield from _values(command, good, flag, *NO_COUNTS)
    yield from _values(command, good, "--workers", str(2**63 - 1), HUGE)
    yield from _values(command, good, "--max-bad-lines", "-1", "x", "", "1.5")
    yield from _values(command, good, "--text-unit", "page", "")
    yield from _values(command, good, "--json-keys", "title", codes=(3,))
    yield from _values(command, good, "--output-prefix", "", "/", f"{folder}/")
    null = [*good[:2], "--tokenizer-type=NullTokenizer", "--workers=1", "--overwrite"]
    yield from _values(command, null, "--vocab-size", *NO_COUNTS, HUGE, str(2**63 - 1))
    yield from _each(kind, command, null, (2,), ())
    # argparse takes words that begin as one of the names for those names.
    yield from _each(kind, command, good, CONFIGURATION, *NO_TOKENIZER)
    yield from _paths(command, ["--input"], good[1:], paths, (2, 3))
    for what in OUTPUTS:
        argv = [*good, f"--output-prefix={paths[what]}"]
        yield from _each("preprocess_data: paths", command, argv, (2, 3), ())
    files = {"text": str(samples.text), "index": f"{samples.prefix}.idx", **paths}
    for what, path in files.items():
        if what not in ("empty", "no UTF-8"):
            flags = ("--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={path}")
            yield from _each(
                "preprocess_data: tokenizer", command, [*good[:2], "--overwrite"], (2, 3), flags
            )
    for number, content in enumerate(ODD_TEXTS):
        path = folder / f"raw_{number}.jsonl"
        path.write_bytes(content)
        yield from _each("preprocess_data: data", command, [f"--input={path}", *good[1:]], (3,), ())


def _plan(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    yield from _planned("plan", samples, paths)


def _simulate(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    yield from _planned("simulate", samples, paths)
    jitter = [*BASE, "--jitter=0.1"]
    for flag in ("--copies", "--width"):
        yield from _values("simulate", jitter, flag, *NO_COUNTS, HUGE, str(2**63 - 1))
    yield from _values("simulate", jitter, "--seed", "-1", "x", "", "1.5")
    yield from _values("simulate", BASE, "--seed", "3")
    yield from _values("simulate", BASE, "--copies", "2")
    yield from _values("simulate", BASE, "--jitter", "-1", "nan", "11", "x", "", "inf")
    slow = ("x", "", "1", ":", "9:2", "-1:2", "0:0", "0:-1", "0:nan", "0:inf", "0:x", f"{HUGE}:2")
    yield from _values("simulate", BASE, "--slow", *slow)
    yield from _values("simulate", (), "--paper", "x", "", "NETWORK")
    yield from _each(
        "simulate: flags", "simulate", (), (2,), ("--paper=radius", "--world-size=2"),
        ("--paper=radius", "--num-layers=2"), (*BASE, "--out=x"),
    )  # fmt: skip


def _planned(command: str, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    """Yield the common cases of plan and simulate."""
    yield from _each(f"{command}: flags", command, (), (2,), (), ("--hiden-size=3",))
    yield from _each(f"{command}: flags", command, BASE, (2,), ["--lr=nan"], ["--num-layer=2"])
    sizes = (str(2**63 - 1), HUGE, "100001", "9" * 5000)
    yield from _values(command, BASE, "--world-size", *NO_COUNTS, *sizes)
    yield from _values(command, BASE, "--site", "nowhere", "../local", "a\nb", "n" * 300)
    yield from _values(command, BASE, "--gpu", "abacus", "a\nb")
    yield from _values(command, BASE, "--efficiency", "0", "-1", "2", "nan", "inf", "x", "")
    yield from _paths(command, ["--config"], [], paths, CONFIGURATION)
    yield from _paths(command, [], [], paths, CONFIGURATION, without=["empty"])
    for place in ("data", "masks.npz", "corpus.jsonl", "tokenizer.json", "run/status.json"):
        yield from _each(f"{command}: paths", command, [samples.folder / place], (2,), ())


def _others(folder: Path, samples: Samples, paths: dict[str, str]) -> Iterator[SweepCase]:
    for axis in ("--tp", "--pp", "--dp"):
        yield from _values("parity", (), axis, *NO_COUNTS, HUGE, str(2**63 - 1))
    yield from _values("parity", (), "--num-layers-per-virtual-pipeline-stage", *NO_COUNTS)
    yield from _each(
        "parity: flags", "parity", (), (2,), ("--paths=no",), ("--tpp=2",), ("--",
        "--hiden-size=3"),
        ("--", "--lr=nan"), ("--tp=3",), ("a",),
    )  # fmt: skip
    yield from _paths("study", ["--list"], [], paths, CONFIGURATION)
    yield from _each("faults_table: flags", "faults_table", (), (2,), (), ("a", "b"))
    yield from _paths("faults_table", [], [], paths, (2, 3))
    yield from _each("faults_table: paths", "faults_table", [samples.text], (3,), ())
    bomb = folder / "bomb.xml"
    bomb.write_text(XML_BOMB)
    yield from _each("faults_table: paths", "faults_table", [bomb], (3,), ())
    out = f"--output={folder / 'stdlib'}"
    yield from _each("stdlib_corpus: flags", "stdlib_corpus", (), (2,), (), ("--outptu=x",))
    few = [out, f"--library={samples.folder / 'data'}"]
    yield from _each("stdlib_corpus: paths", "stdlib_corpus", few, (3,), ())
    yield from _values("stdlib_corpus", few, "--max-bytes", *NO_COUNTS)
    yield from _values("stdlib_corpus", few, "--vocab-size", "x", "", "1.5")
    yield from _paths("stdlib_corpus", [out, "--library"], [], paths, DATA, without=["empty"])
    yield from _each("doctor_settings: flags", "doctor_settings", (), (2,), (), ("a", "--device=x"))
    yield from _each("doctor_host: flags", "doctor_host", (), (2,), (), ("a", "--nodes=x"))


PAIRS = (
    "--fp16 --bf16", "--grad-reduce-in-bf16", "--loss-scale=2", "--train-samples=8",
    "--rampup-batch-size 2 2 8", "--lr-decay-samples=3", "--lr-warmup-samples=3",
    "--lr-warmup-fraction=0.1 --lr-warmup-iters=1", "--lr-decay-style=WSD", 
    "--hidden-size=33", "--micro-batch-size=3 --global-batch-size=4",
    "--tensor-model-parallel-size=3", "--tensor-model-parallel-size=2",
    "--pipeline-model-parallel-size=2", "--pipeline-model-parallel-size=3",
    "--num-layers-per-virtual-pipeline-stage=1", "--decoder-first-pipeline-num-layers=2",
    "--decoder-last-pipeline-num-layers=9", 
    "--max-position-embeddings=8",
    "--samo-sparsity=0.5", "--radius-density=0.5", "--topk-density=0.5", "--powersgd-rank=2",
    "--powersgd-rank-share=0.5", "--lowrank-density=0.5", "--roundrobin-interval=2",
    "--demo-k=4", "--grad-path=demo",
    "--grad-path=samo --samo-pruning=file", "--grad-path=samo --samo-mask-file=x",
    "--grad-path=radius --radius-start-iter=1 --radius-start-fraction=0.5",
    "--use-checkpoint-args", "--split=1,2,x", "--split=0,0,0", "--split=nan,1,1", "--split=1",
    "--split=-1,2,3", "--save=/proc/nowhere --load=x --ckpt-step=-1", "--min-lr=1",
    "--recompute-method=block", "--recompute-num-layers=3", "--start-weight-decay=0.1",
    "--dataloader-type=cyclic", "--use-rope-scaling", "--apply-layernorm-1p", "--no-such=\x1b[31m",
    "--reset-attention-mask --position-embedding-type=rope --seq-length=0",
    "--optimizer=sgd --adam-beta1=2", "--device=tpu", "--profile --profile-ranks 7",
    "--profile --profile-step-start=5 --profile-step-end=5", "--resume", "--version",
    "--dtype=bf16",
    "--init_from=x", "--gradient-accumulation-steps=2", "--block_size=3", "--precision=bf16",
)  # fmt: skip
"""Flags that exclude each other, lack another flag, or belong to other programs."""

ODD_YAML: tuple[str | bytes, ...] = (
    b"", b"\n\n", b"# nothing\n", b"[1, 2]\n", b"text\n", b"3\n", b"\x00" * 64, b"\xff\xfe\x00",
    "a: 1".encode("utf-16"), b"a: [" + b"[" * 5000, b"a: " + b"{b: " * 3000, b"- " * 3000,
    b"a: 1\n" * 30_000, b"x" * (2 << 20), b"%YAML 3.0\n---\na: 1\n", b"---\na: 1\n---\nb: 2\n",
    b"{a: 1, a: 2}\n", b"? [a, b]\n: 1\n", b"seed: !!python/object/apply:os.system [ls]\n",
    b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n", b"PK\x03\x04 zip",
    "seed: !!int 3\n", "seed: 3 # fine\n  odd: 4\n", "\tseed: 3\n", "seed: |\n  3\n  4\n",
    "<<: {seed: 3}\n", "seed: *nobody\n", "seed: 'open\n", "seed: \"\\x\"\n", "model: 3\n",
    "model: {num_layers: 2, num_layers: 3}\n", "model:\n  seed: 3\n",
    "training:\n  num_layers: 3\n",
    "no_such: 3\n", "no_such:\n  seed: 3\n", "Seed: 3\n", "SEED: 3\n", "seed : : 3\n", "seed 3\n",
    "seed: 3\nseed: 4\n", "config: x.yaml\n", "--seed: 3\n", "1: 2\n", "null: 3\n", "~: 3\n",
    "true: 3\n", "? \n: \n", "extensions: [a]\n", "name: x\n", "notices: [a]\n", 
    "seed: []\n", "seed: 2026-01-01\n", "seed: 1:30\n", "seed: 1_000\n", "seed: +\n", "@: 3\n",
    "data_path: {a: b}\n", "data_path: [[a]]\n", "data_path: []\n", "split: 969\n", "lr: 1e\n",
    "grad_path: \"den\\0se\"\n", "run_dir: \"a\\nb\"\n", "run_dir: ''\n", "run_dir: 3\n",
    "num_layers: 2 3\n", "seed: \u0663\n", "s\u0435ed: 3\n", "seed: 0x10\n",
)  # fmt: skip
"""Texts that follow a valid file, and bytes that stand alone."""

ODD_TEXTS = (
    b"", b"\n\n\n", b"{", b"[]\n", b'"text"\n', b"3\n", b'{"text": 3}\n', b'{"text": null}\n',
    b'{"text": ["a"]}\n', b'{"body": "a"}\n', b"\xff\xfe\n", b"\x00" * 100, b"[" * 100_000 + b"\n",
    b'{"text": ' + b"9" * 5000 + b"}\n", b'{"text": "a"', b'{"text": "\xff"}\n', b"{}\n", b"nan\n",
    b'{"text": "ok"}\n{"text": \n', b'{"text": "\\ud800"}\n', b'{"text": "a\\u0000b"} trailing\n',
)  # fmt: skip

ODD_TASKS = (
    *((task, line) for task in ("lambada", "multiple-choice", "blimp", "piqa") for line in (
        b"", b"{", b"[]\n", b"3\n", b"{}\n", b"null\n", b"\xff\n", b"[" * 100_000 + b"\n",
        b'{"text": 3}\n', b'{"text": ""}\n', b'{"text": "one"}\n', b'{"context": "a"}\n',
        b'{"context": 3, "continuation": "a"}\n', b'{"context": "a", "continuation": ""}\n',
        b'{"context": "a", "choices": "bc", "answer": 0}\n',
        b'{"context": "a", "choices": ["b"], "answer": 0}\n',
        b'{"context": "a", "choices": ["b", 3], "answer": 0}\n',
        b'{"context": "a", "choices": ["b", "c"], "answer": 2}\n',
        b'{"context": "a", "choices": ["b", "c"], "answer": -1}\n',
        b'{"context": "a", "choices": ["b", "c"], "answer": true}\n',
        b'{"context": "a", "choices": ["b", "c"], "answer": ' + b"9" * 5000 + b"}\n",
        b'{"text": ' + b"9" * 5000 + b"}\n",
    )),
)  # fmt: skip

_INDEX = "model.safetensors.index.json"
ODD_WEIGHTS = (
    ("model.safetensors", b""), ("model.safetensors", b"{}"), ("model.safetensors", b"\xff" * 64),
    ("model.safetensors", (2).to_bytes(8, "little") + b"{}"), ("pytorch_model.bin", b"\x80\x04N."),
    ("model.safetensors", (2**40).to_bytes(8, "little") + b"{}"), (_INDEX, b"{}"), (_INDEX, b"[]"),
    (_INDEX, b'{"weight_map": []}'), (_INDEX, b'{"weight_map": "a"}'), (_INDEX, b"{"),
    (_INDEX, b'{"weight_map": {"a": "../../x"}}'), (_INDEX, b'{"weight_map": {"a": 3}}'),
    (_INDEX, b'{"weight_map": {"a": null}}'), (_INDEX, b'{"weight_map": {"a": "no.safetensors"}}'),
    (_INDEX, b'{"weight_map": {"a": "config.json"}}'), (_INDEX, b'{"weight_map": {"a": ""}}'),
)  # fmt: skip
ODD_HF = (
    b"", b"[]", b"{", b"3", b"{}", b'{"model_type": 3}', b'{"model_type": []}',
    b'{"model_type": "bert"}', b'{"model_type": "gpt2", "model_type": "gpt2"}', b"[" * 100_000,
    *(b'{"model_type": "%s", "%s": %s}' % (kind, key, value)
      for kind, keys in (
          (b"gpt2", (b"n_layer", b"n_embd", b"n_head", b"n_positions", b"activation_function",
                     b"layer_norm_epsilon", b"attn_pdrop", b"scale_attn_weights")),
          (b"llama", (b"num_hidden_layers", b"hidden_size", b"num_attention_heads", b"head_dim",
                      b"max_position_embeddings", b"rms_norm_eps", b"rope_theta", b"hidden_act",
                      b"attention_bias", b"num_key_value_heads", b"rope_parameters")),
      ) for key in keys for value in (
          b'"x"', b"[1]", b'{"rope_type": "yarn"}', b"-3", b"1e999", b"NaN", b"9" * 5000,
          b"1" + b"0" * 400,
      )),
)  # fmt: skip
"""Hugging Face configurations that cannot be imported."""

XML_BOMB = (
    '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x0 "x">'
    + "".join(f'<!ENTITY x{n} "{f"&x{n - 1};" * 10}">' for n in range(1, 10))
    + "]><a>&x9;</a>"
)
