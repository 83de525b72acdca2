"""Profile the memory of a training step: planned, tracked on fake tensors, measured.

    python tools/profile_memory.py CONFIG [--accounting {actual,paper}] [--json] [--out FOLDER]
        [--world-size N] [--rank R] [--no-measured] [FLAGS OF the entry script]

Bytes by the kinds of "Low-Memory Neural Network Training" (model, optimizer, activations), by layer
and over the course of a step, with the operator at the peak, and FLOPs with recomputation apart.
CONFIG is a file of pretrain_gpt.py, pretrain_vision.py or pretrain_translation.py; its section
`model` tells which. `--accounting paper` counts by the report's own rules, from shapes alone, with
`--strategy` and `--nonzero`. `--out` writes ledger.json and memory.png, a pie and a timeline.
`--json` prints the totals as one line of JSON, the last one.

Exit code 2 for wrong settings. Only the columns `tracked` and `measured` load torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config import Config, GPTConfig, parse, resolve  # noqa: E402
from megatron.config.parsing import fields_by_section, read_entries  # noqa: E402
from megatron.errors import ConfigError, SparsetronError  # noqa: E402
from megatron.low_memory.operation_graph import gpt_graph, wide_resnet_graph  # noqa: E402
from megatron.low_memory.paper_accounting import (  # noqa: E402
    DICTIONARIES,
    MB,
    CountedNetwork,
    DynamicConvShape,
    PaperAccount,
    account,
    dynamic_conv_network,
    gpt_network,
    wide_resnet_network,
)
from megatron.low_memory.strategies import Strategy, StrategyName  # noqa: E402
from megatron.memory_estimate import logical_shapes  # noqa: E402
from megatron.tasks.translation_config import TranslationConfig  # noqa: E402
from megatron.tasks.vision_config import VisionConfig  # noqa: E402
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS  # noqa: E402
from pretrain_translation import TRANSLATION_TASK  # noqa: E402
from pretrain_vision import VISION_TASK  # noqa: E402
from tools.plan import vocabulary_of  # noqa: E402

TASKS = (GPT_TASK, VISION_TASK, TRANSLATION_TASK)
STRATEGY = re.compile(r"(none|no-norm)|(every|residual|residual-star)-([1-9]\d*)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    try:
        options, flags = _arguments(list(sys.argv[1:] if arguments is None else arguments))
        config = parse(flags, paths=GRADIENT_PATHS, task=_task_of(flags).config)
        world = options.world_size or config.parallel.model_parallel_size
        config = resolve(config, world)
        profile = _paper if options.accounting == "paper" else _actual
        data = profile(config, world, options)
        if options.out is not None:
            text = json.dumps(data, indent=1) + "\n"
            (options.out / "ledger.json").write_text(text, encoding="utf-8")
        if options.json:
            print(json.dumps(data))
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _task_of(flags: Sequence[str]) -> Any:
    """Return the task whose section `model` has the keys of the file; GPT without a file."""
    if "--config" not in flags:
        return GPT_TASK
    path = flags[flags.index("--config") + 1]
    keys = {entry.key for entry in read_entries(path)}
    known = {
        task: {field.name for field in fields_by_section(GRADIENT_PATHS, task.config)["model"]}
        for task in TASKS
    }
    return max(TASKS, key=lambda task: len(keys & known[task]))


def _actual(config: Config, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """Print the ledger of a rank, and return its totals."""
    from megatron.low_memory.ledger import COLUMNS, memory_ledger
    from megatron.low_memory.ledger_report import draw_ledger, ledger_lines

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
    if options.out is not None:
        draw_ledger(options.out / "memory.png", ledger)
    return ledger.as_data()


def _open(config: Config) -> tuple[Any, int]:
    """Return the model of a configuration without its data, and the vocabulary of a GPT."""
    if isinstance(config, GPTConfig):
        from megatron.data.vocabulary import Vocabulary
        from megatron.tasks.gpt import LoadedGPT

        size, note = vocabulary_of(config)
        print(f"note: {note}\n" if note else "", end="")
        return LoadedGPT(GPT_TASK, config, Vocabulary(size=size)), size
    if isinstance(config, VisionConfig):
        return VISION_TASK.open(config), 0
    from megatron.low_memory.dry_run import DryTranslation

    print(f"note: dictionaries of {DICTIONARIES[0]:,} and {DICTIONARIES[1]:,} entries are assumed")
    return DryTranslation(cast(TranslationConfig, config), *DICTIONARIES), 0


def _paper(config: Config, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """Print the report's accounting of a model, and return its totals."""
    bits = 32 if config.precision.param_dtype == "float32" else 16
    title, network, graph, microbatch = _counted(config)
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
    if counted is not None:
        peak = counted.activations.peak
        data |= asdict(counted.bytes) | {
            "total": counted.bytes.total,
            "peak_at": peak.operation,
            "training_flops": counted.activations.training_flops,
            "recomputed_flops": counted.activations.recomputed_flops,
        }
        if options.out is not None:
            from megatron.low_memory.ledger_report import draw_course

            kinds = {k: float(getattr(counted.bytes, k)) for k in counted.bytes.shares}
            draw_course(options.out / "memory.png", title, kinds, counted.activations)
    return data


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


def _counted(config: Config) -> tuple[str, CountedNetwork, Any, int]:
    """Return a model's title, parameters, operations and samples of a microbatch."""
    batch = config.training.micro_batch_size
    if isinstance(config, VisionConfig):
        model = config.model
        if model.vision_backbone_type != "wide-resnet":
            raise ConfigError(
                f"vision_backbone_type: {model.vision_backbone_type} is no network of the report; "
                "give wide-resnet, or leave out --accounting paper"
            )
        size = {"depth": model.depth, "width": model.width, "classes": model.num_classes}
        graph = wide_resnet_graph(**size, height=model.img_h, image_width=model.img_w)
        return model.title, wide_resnet_network(**size), graph, batch
    if isinstance(config, GPTConfig):
        vocabulary, _ = vocabulary_of(config)
        shapes = logical_shapes(
            config, GRADIENT_PATHS[config.gradient.grad_path], vocabulary=vocabulary
        )
        model = config.model
        graph = gpt_graph(
            layers=model.num_layers,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            ffn=model.ffn_size,
            vocabulary=vocabulary,
            length=model.seq_length,
        )
        return f"GPT of {model.num_layers} layers", gpt_network(shapes), graph, batch
    shape = cast(TranslationConfig, config).model
    network = dynamic_conv_network(
        DynamicConvShape(
            embed_dim=shape.embed_dim,
            ffn_size=shape.ffn_size,
            attention_heads=shape.attention_heads,
            encoder_kernels=shape.encoder_kernels,
            decoder_kernels=shape.decoder_kernels,
            decoder_layers=shape.decoder_layers,
        )
    )
    return "DC-Transformer", network, None, batch


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This tool's own options, and what is left for the configuration."""
    config = [] if not argv or argv[0].startswith("-") else ["--config", argv.pop(0)]
    parser = _ProfileParser(
        usage="tools/profile_memory.py CONFIG [--accounting {actual,paper}] [--json] "
        "[--out FOLDER] [--world-size N] [--rank R] [--no-measured] [--strategy NAME] "
        "[--nonzero X] [FLAGS OF the entry script]",
        description=(__doc__ or "").split("\n")[0],
        epilog="pretrain_gpt.py --help lists the flags of a run.",
        allow_abbrev=False,
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
    parser.add_argument("--rank", type=int, default=0, help="rank that is profiled (0)")
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
    if options.out is not None and not options.out.is_dir():
        raise ConfigError(f"--out {options.out}: is no folder; create it first")
    return options, [*config, *rest]


class _ProfileParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see tools/profile_memory.py --help")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, from 1 to 100,000")
    return int(text)


def _strategy(text: str) -> Strategy:
    found = STRATEGY.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no strategy: none, no-norm, every-M, residual-M, residual-star-M"
        )
    name = cast(StrategyName, found[1] or found[2])
    return Strategy(name, int(found[3] or 1))


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
