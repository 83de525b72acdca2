"""Profile the memory of a training step: planned, tracked on fake tensors, measured.

    python tools/profile_memory.py CONFIG [--task {gpt,vision,translation}]
        [--accounting {actual,paper}] [--json] [--out FOLDER] [--world-size N] [--rank R]
        [--no-measured] [FLAGS OF the entry script]

Bytes by the kinds of "Low-Memory Neural Network Training" (model, optimizer, activations), by layer
and over the course of a step, with the operator at the peak, and FLOPs with recomputation apart.
CONFIG is a file of pretrain_TASK.py. `--accounting paper` counts by the report's own rules, from
shapes alone, with `--strategy` and `--nonzero`, and refuses settings that the rules do not cover.
`--out` writes ledger.json, from which report.html of a run in that folder draws, and memory.png, a
pie and a timeline. `--json` prints the totals as one line of JSON, the last one.

Exit code 2 for wrong settings. Only the columns `tracked` and `measured` load torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config import Config, GPTConfig, parse, resolve  # noqa: E402
from megatron.config.fields import whole_number  # noqa: E402
from megatron.errors import ConfigError, SparsetronError  # noqa: E402
from megatron.low_memory.memory_budget import within_budget  # noqa: E402
from megatron.low_memory.operation_graph import Graph, gpt_graph, wide_resnet_graph  # noqa: E402
from megatron.low_memory.strategies import Strategy, StrategyName  # noqa: E402
from megatron.memory_estimate import RankGrid  # noqa: E402
from megatron.parallel.dims import ParallelDims  # noqa: E402
from megatron.tasks.translation_config import TranslationConfig  # noqa: E402
from megatron.tasks.vision_config import VisionConfig  # noqa: E402
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS  # noqa: E402
from pretrain_translation import TRANSLATION_TASK  # noqa: E402
from pretrain_vision import VISION_TASK  # noqa: E402
from tools.plan import vocabulary_of  # noqa: E402
from tools.planner.paper_accounting import (  # noqa: E402
    DICTIONARIES,
    KINDS,
    MB,
    CountedNetwork,
    PaperAccount,
    account,
    check_covered,
    dynamic_conv_network,
    gpt_network,
    wide_resnet_network,
)

if TYPE_CHECKING:
    from megatron.low_memory.dry_run import Profiled

TASKS = {task.config.task: task for task in (GPT_TASK, VISION_TASK, TRANSLATION_TASK)}
"""Tasks by the name in their entry script, `pretrain_<name>.py`."""
NAMES: tuple[StrategyName, ...] = ("none", "no-norm", "every", "residual", "residual-star")
STRATEGY = re.compile(r"(none|no-norm)|(every|residual|residual-star)-([1-9]\d*)")


ASSUMED_DICTIONARIES = (
    f"dictionaries of {DICTIONARIES[0]:,} and {DICTIONARIES[1]:,} entries are assumed"
)
TRACKED_ON_CPU = "tracked is a step on a CPU, also with --device cuda"


class Profile(NamedTuple):
    """The totals of an accounting.

    `draw` draws its picture to a file, if it has one; `course` has the bytes over a step, which
    the file of the ledger gets beside the totals.
    """

    data: dict[str, Any]
    draw: Callable[[Path], None] | None
    course: Mapping[str, Any] = {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    try:
        options, flags = _arguments(list(sys.argv[1:] if arguments is None else arguments))
        config = parse(flags, paths=GRADIENT_PATHS, task=TASKS[options.task].config)
        world = options.world_size or config.parallel.model_parallel_size
        config = _within_budget(resolve(config, world), world)
        profile = _paper if options.accounting == "paper" else _actual
        found = profile(config, world, options)
        if options.json:
            print(json.dumps(found.data))
        if options.out is not None:
            text = json.dumps({**found.data, **found.course}, indent=1) + "\n"
            _write_ledger(options.out / "ledger.json", text)
            if found.draw is not None:  # last, since it may lack matplotlib
                found.draw(options.out / "memory.png")
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _write_ledger(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}") from None


def _within_budget(config: Config, world: int) -> Config:
    """Return the settings that `--memory-budget` chooses, if it is given, and print the choice."""
    if config.training.memory_budget is None:
        return config
    sizes: Sequence[int] = ()
    if isinstance(config, GPTConfig):
        sizes = (vocabulary_of(config)[0],)
    elif isinstance(config, TranslationConfig):
        sizes = DICTIONARIES
    path = GRADIENT_PATHS[config.gradient.grad_path]
    config = within_budget(config, path, world=world, vocabularies=sizes)
    print(f"note: {config.notices[-1]}")
    return config


def _actual(config: Config, world: int, options: argparse.Namespace) -> Profile:
    """Print the ledger of a rank, and return its totals and its picture."""
    from megatron.low_memory.ledger import COLUMNS, memory_ledger
    from tools.planner.ledger_report import MOST_POINTS, draw_ledger, ledger_lines, thin

    print(_note(config), end="")
    opened, vocabulary = _open(config)
    ledger = memory_ledger(
        opened,
        config,
        GRADIENT_PATHS,
        world=world,
        rank=options.rank,
        vocabulary=vocabulary,
        columns=COLUMNS[:2] if options.no_measured else COLUMNS,
    )
    print("\n".join(ledger_lines(ledger)))
    if config.run.device == "cuda" and "tracked" in ledger.columns:
        print(TRACKED_ON_CPU)
    samples = [asdict(sample) for sample in thin(ledger.samples, MOST_POINTS)]
    return Profile(ledger.as_data(), lambda file: draw_ledger(file, ledger), {"samples": samples})


def _note(config: Config) -> str:
    """Return the line on what is assumed of a vocabulary or of dictionaries; "" if nothing is."""
    if isinstance(config, GPTConfig):
        _, note = vocabulary_of(config)
        return f"note: {note}\n\n" if note else ""
    return f"note: {ASSUMED_DICTIONARIES}\n" if isinstance(config, TranslationConfig) else ""


def _open(config: Config) -> tuple[Profiled, int]:
    """Return the model of a configuration without its data, and the vocabulary of a GPT."""
    if isinstance(config, GPTConfig):
        from megatron.data.vocabulary import Vocabulary
        from megatron.tasks.gpt import LoadedGPT

        size, _ = vocabulary_of(config)
        return LoadedGPT(GPT_TASK, config, Vocabulary(size=size)), size
    if isinstance(config, VisionConfig):
        return VISION_TASK.open(config), 0
    from megatron.low_memory.dry_run import DryTranslation

    assert isinstance(config, TranslationConfig), "the last of TASKS"
    return DryTranslation(config, *DICTIONARIES), 0


def _paper(config: Config, world: int, options: argparse.Namespace) -> Profile:
    """Print the report's accounting of a model, and return its totals and its picture."""
    check_covered(config, world)
    bits = 32 if config.precision.param_dtype == "float32" else 16
    print(_note(config), end="")
    title, network, graph, microbatch = counted_network(config)
    model, optimizer = network.states(bits=bits, nonzero=options.nonzero)
    counted: PaperAccount | None = None
    if graph is not None:
        counted = account(
            network,
            graph,
            bits=bits,
            nonzero=options.nonzero,
            microbatch=microbatch,
            strategy=options.strategy,
        )
    title = f"{title}, {bits} bit, {network.optimizer}"
    print("\n".join(_paper_lines(title, model, optimizer, counted, options.strategy)))
    data: dict[str, Any] = {
        "accounting": "paper",
        "title": title,
        "parameters": network.parameters,
        "bits": bits,
        "nonzero": options.nonzero,
        "strategy": str(options.strategy),
        "model": model,
        "optimizer": optimizer,
    }
    if counted is None:
        return Profile(data, None)
    each, course = counted.bytes, counted.activations
    data |= asdict(each) | {
        "total": each.total,
        "peak_at": course.peak.operation,
        "training_flops": course.training_flops,
        "recomputed_flops": course.recomputed_flops,
    }

    def draw(file: Path) -> None:
        from tools.planner.ledger_report import draw_course

        draw_course(file, title, {kind: float(getattr(each, kind)) for kind in KINDS}, course)

    return Profile(data, draw)


def _paper_lines(
    title: str, model: int, optimizer: int, counted: PaperAccount | None, strategy: Strategy
) -> Iterator[str]:
    yield f"{title}, by the accounting of Sohoni et al. 2019; MB are 10^6 bytes"
    yield f"model        {model / MB:>12.3f} MB"
    yield f"optimizer    {optimizer / MB:>12.3f} MB"
    if counted is None:
        yield "activations: the report gives no rule for dynamic convolutions"
        return
    each, course = counted.bytes, counted.activations
    yield f"activations  {each.activations / MB:>12.3f} MB under {strategy}"
    yield f"statistics   {each.statistics / MB:>12.3f} MB"
    yield f"total        {each.total / MB:>12.3f} MB"
    yield f"peak at `{course.peak.operation}` of {'back' if course.peak.is_backward else 'for'}ward"
    yield (
        f"GFLOP of a microbatch: {course.training_flops / 1e9:.3f}, recomputed "
        f"{course.recomputed_flops / 1e9:.3f} ({course.flops_ratio - 1:.1%})"
    )


def counted_network(config: Config) -> tuple[str, CountedNetwork, Graph | None, int]:
    """Return a model's title, parameters, operations and samples of a microbatch."""
    batch, optimizer = config.training.micro_batch_size, config.optimizer.optimizer
    if isinstance(config, VisionConfig):
        model = config.model
        size = {"depth": model.depth, "width": model.width, "classes": model.num_classes}
        graph = wide_resnet_graph(**size, height=model.img_h, image_width=model.img_w)
        return model.title, wide_resnet_network(**size, optimizer=optimizer), graph, batch
    if isinstance(config, GPTConfig):
        vocabulary, _ = vocabulary_of(config)
        model = config.model
        graph = gpt_graph(
            layers=model.num_layers,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            ffn=model.ffn_size,
            vocabulary=model.padded_vocab_size(vocabulary),
            length=model.seq_length,
        )
        network = gpt_network(_padded_shapes(config, vocabulary), optimizer=optimizer)
        return f"GPT of {model.num_layers} layers", network, graph, batch
    assert isinstance(config, TranslationConfig), "the last of TASKS"
    return "DC-Transformer", dynamic_conv_network(config.model, optimizer=optimizer), None, batch


def _padded_shapes(config: GPTConfig, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a GPT's parameters with the vocabulary padded, as they are trained."""
    path = GRADIENT_PATHS[config.gradient.grad_path]
    # Shapes do not depend on the buckets or the device.
    grid = RankGrid(
        config=config,
        dims=ParallelDims(tp=1, dp=1, pp=1),
        path=path,
        vocabulary=vocabulary,
        cap=1,
        device="cpu",
    )
    params = grid.rank().params.values()
    return {param.name: (param.rows, *param.logical_shape[1:]) for param in params}


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this tool's own options, and the arguments that are left for the configuration."""
    config = [] if not argv or argv[0].startswith("-") else ["--config", argv.pop(0)]
    parser = _ProfileParser(
        usage="tools/profile_memory.py CONFIG [--task {gpt,vision,translation}] "
        "[--accounting {actual,paper}] [--json] [--out FOLDER] [--world-size N] [--rank R] "
        "[--no-measured] [--strategy NAME] [--nonzero X] [FLAGS OF the entry script]",
        description=(__doc__ or "").split("\n")[0],
        epilog="pretrain_TASK.py --help lists the flags of a run.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--task",
        choices=tuple(TASKS),
        default=GPT_TASK.config.task,
        help="task of CONFIG, as in the name of its entry script, pretrain_TASK.py (gpt)",
    )
    parser.add_argument(
        "--accounting",
        choices=("actual", "paper"),
        default="actual",
        help="count a step of this program, or by the rules of Sohoni et al. 2019",
    )
    parser.add_argument("--json", action="store_true", help="print the totals as JSON at the end")
    parser.add_argument("--out", type=Path, help="folder for ledger.json and memory.png")
    parser.add_argument("--world-size", type=_count, help="ranks (one copy of the model)")
    parser.add_argument("--rank", type=whole_number, default=0, help="rank that is profiled (0)")
    parser.add_argument("--no-measured", action="store_true", help="run no step on real tensors")
    parser.add_argument(
        "--strategy",
        type=_strategy,
        default=Strategy("none"),
        help="checkpointing of the report's accounting: none, no-norm, every-M, residual-M or "
        "residual-star-M (none)",
    )
    parser.add_argument(
        "--nonzero",
        type=_share,
        default=1.0,
        help="share of nonzeros in sparse tensors, in the report's accounting (1)",
    )
    options, rest = parser.parse_known_args(argv)
    other, names = _OTHER_ACCOUNTING[options.accounting]
    for name in names:
        if getattr(options, name) != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: belongs to --accounting {other}; leave it out, or add that")
    if options.out is not None and not options.out.is_dir():
        raise ConfigError(f"--out {options.out}: is no folder; create it first")
    if options.out is not None:
        _check_takes_files(options.out)
    return options, [*config, *rest]


def _check_takes_files(folder: Path) -> None:
    # A profile may take minutes, and its files are written last.
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from None


_OTHER_ACCOUNTING = {
    "actual": ("paper", ("strategy", "nonzero")),
    "paper": ("actual", ("rank", "no_measured")),
}
"""The other accounting of each, and the options that it alone reads."""


class _ProfileParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see tools/profile_memory.py --help")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, from 1 to 100,000")
    return int(text)


def _strategy(text: str) -> Strategy:
    found = STRATEGY.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no strategy: none, no-norm, every-M, residual-M, residual-star-M"
        )
    return Strategy(NAMES[NAMES.index(found[1] or found[2])], int(found[3] or 1))


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1")
    return share


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
