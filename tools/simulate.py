"""Simulate a training step event by event: stages, messages, collectives, optimizer.

    python tools/simulate.py CONFIG --world-size N [--site NAME] [--gpu KIND] [--efficiency X]
        [--slow STAGE:TIMES] [--jitter SIGMA] [--seed N] [--copies N] [--blocking-messages]
        [--width COLUMNS] [--json] [FLAGS OF pretrain_gpt.py]
    python tools/simulate.py --paper network|radius|axonn|samo|all|shapes [--out FOLDER] [--json]

Needs neither GPU nor torch. Durations are those of tools/plan.py, whose phases add up; in the
simulation they overlap. `--slow 2:1.5` makes all passes of stage 2 take 1.5 times as long.
`--jitter 0.3` multiplies each pass by a log-normal factor, in `--copies` simulated pipelines whose
all-reduces wait for the slowest. With `--blocking-messages` a message keeps sender and receiver
from computing.

`--paper` compares the simulation with measurements of papers and of this repository's benchmarks,
and lists fitted constants; `--out` writes README.md and results.json. `--paper shapes` compares one
share of peak with a law of the shapes of products, in shapes.md and shapes.json.

Exit code 2 for wrong settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config import parse, resolve  # noqa: E402
from megatron.errors import ConfigError, SparsetronError  # noqa: E402
from megatron.pipeline.schedule import Operation  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402
from tools.plan import Planner, assumed_site, ranks, site_of, vocabulary_of  # noqa: E402
from tools.planner.course import Setting, jittered  # noqa: E402
from tools.planner.drawing import drawing  # noqa: E402
from tools.planner.plan import Plan  # noqa: E402
from tools.planner.replay import page, shapes  # noqa: E402
from tools.planner.seconds import Lasts  # noqa: E402
from tools.planner.simulation import SimulatedStep, mean_seconds, simulate  # noqa: E402
from tools.planner.timeline import Factor, jitter, slow  # noqa: E402

WIDTH = 88
WIDEST = 100_000
OF_A_RUN = ("world_size", "site", "gpu", "efficiency", "slow", "jitter", "seed", "copies") + (
    "blocking_messages",
    "width",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    try:
        options, flags = _arguments(list(sys.argv[1:] if arguments is None else arguments))
        if options.paper:
            _papers(options, flags)
            return 0
        config = parse(flags, paths=GRADIENT_PATHS)
        world = options.world_size or config.parallel.model_parallel_size
        config = resolve(config, world)
        site = site_of(options)
        vocabulary, note = vocabulary_of(config)
        plan = Planner(site, vocabulary).plan(config, world)
        setting = _setting(plan, options)
        steps = simulate(setting)
        if options.json:
            print(json.dumps(_data(plan, steps), indent=1))
            return 0
        print("\n".join(_text(plan, setting, steps, options.width or WIDTH)))
        for each in [assumed_site(site)] * (options.site is None) + [note] * bool(note):
            print(f"note: {each}")
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _shapes(options: argparse.Namespace) -> None:
    found = shapes.data()
    if options.out:
        shapes.write(found, Path(options.out))
    else:
        print(json.dumps(found, indent=1) if options.json else "\n".join(shapes.lines(found)))


def _papers(options: argparse.Namespace, flags: Sequence[str]) -> None:
    own = [
        f"--{name.replace('_', '-')}"
        for name in OF_A_RUN
        if getattr(options, name) not in (None, False)
    ]
    if others := [*own, *flags]:
        raise ConfigError(f"--paper: {others[0]!r} belongs to no paper; leave it out")
    if options.paper == "shapes":
        _shapes(options)
        return
    found = page.tables(options.paper)
    if options.out:
        try:
            page.write(found, Path(options.out))
        except OSError as error:
            raise ConfigError(f"--out {options.out}: {error.strerror}; give a folder") from None
    if options.json:
        print(json.dumps({"tables": [each.data for each in found]}, indent=1))
    elif not options.out:
        print("\n".join(page.lines(found)))


def _setting(plan: Plan, options: argparse.Namespace) -> Setting:
    setting = Setting.of(plan.grid, plan.site, [stage.rank for stage in plan.stages])
    if options.blocking_messages:
        setting = replace(setting, links=replace(setting.links, blocking=True))
    for name in ("copies", "seed"):
        if getattr(options, name) is not None and not options.jitter:
            raise ConfigError(f"--{name}: without --jitter all passes are alike; give that too")
    factors: list[Factor] = []
    if options.slow:
        stage, times = options.slow
        if stage >= plan.grid.dims.pp:
            raise ConfigError(
                f"--slow: there is no stage {stage} of {plan.grid.dims.pp}, the first is 0"
            )
        factors.append(slow(stage, times))
    if not factors and not options.jitter:
        return setting
    copies, seed = options.copies or 1, options.seed or 0
    if copies > plan.grid.dims.dp:
        raise ConfigError(f"--copies: there are no more than {plan.grid.dims.dp} pipelines")

    def lasts(copy: int) -> Lasts:
        each = [*factors]
        if options.jitter:
            each.append(jitter(seed + copy, options.jitter))

        def factor(rank: int, operation: Operation) -> float:
            product = 1.0
            for one in each:
                product *= float(one(rank, operation))
            return product

        return jittered(factor)

    return replace(setting, lasts=[lasts(copy) for copy in range(copies)])


def _text(
    plan: Plan, setting: Setting, steps: Sequence[SimulatedStep], width: int
) -> Iterator[str]:
    dims, site = plan.grid.dims, plan.site
    yield f"{plan.parameters:,} parameters, {dims}, {plan.microbatches} microbatches a pipeline"
    yield f"{site.name}, {site.gpu}: {site.efficiency:.2f} of peak assumed; times are a model"
    usual = max(steps, key=lambda step: step.count)
    for step in steps:
        yield ""
        yield f"{step.name}: {step.length:.4g} s" + (f", {step.count:,} steps" * bool(step.count))
        shown = asdict(step.phases)
        reduce = shown.pop("reduce")
        yield "  " + ", ".join(f"{name} {seconds:.4g}" for name, seconds in shown.items())
        yield f"  collectives {reduce:.4g}, of which {shown['exposed']:.4g} are exposed"
    yield ""
    mean = mean_seconds(steps)
    yield f"mean step {mean:.4g} s, {plan.tokens / mean:,.0f} tokens/s"
    yield f"the planner, whose phases do not overlap: {plan.seconds.total:.4g} s"
    yield ""
    yield f"{usual.name}:"
    yield from drawing(usual, width=width)


def _data(plan: Plan, steps: Sequence[SimulatedStep]) -> dict[str, Any]:
    return {
        "mean_seconds": mean_seconds(steps),
        "planner_seconds": plan.seconds.total,
        "steps": [
            {
                "name": step.name,
                "count": step.count,
                "seconds": step.length,
                "phases": asdict(step.phases),
                "not_played_seconds": step.courses[0].skipped,
                "passes": [
                    {
                        "stage": stage,
                        "kind": passed.operation.kind.name.lower(),
                        "microbatch": passed.operation.microbatch,
                        "chunk": passed.operation.chunk,
                        "start": float(passed.start),
                        "stop": float(passed.stop),
                    }
                    for stage, each in enumerate(step.courses[0].timeline.ranks)
                    for passed in each
                ],
                "events": [event._asdict() for event in step.events],
            }
            for step in steps
        ],
    }


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this tool, and the arguments of `pretrain_gpt.py`."""
    config = [] if not argv or argv[0].startswith("-") else ["--config", argv.pop(0)]
    parser = _SimulateParser(
        usage="tools/simulate.py CONFIG --world-size N [OPTIONS] [FLAGS OF pretrain_gpt.py]\n"
        "       tools/simulate.py --paper NAME [--out FOLDER] [--json]",
        description=(__doc__ or "").split("\n")[0],
        epilog="pretrain_gpt.py --help lists the flags of a run.",
        allow_abbrev=False,
    )
    run = parser.add_argument_group("of a run")
    run.add_argument("--world-size", type=ranks, metavar="N", help="ranks (one copy of the model)")
    run.add_argument("--site", metavar="NAME", help="machine, of scripts/site (local: CPU ranks)")
    run.add_argument("--gpu", metavar="KIND", help="kind of GPU (the site's first)")
    run.add_argument("--efficiency", type=float, metavar="X", help="share of peak (the site's)")
    run.add_argument(
        "--slow",
        type=_slow,
        metavar="STAGE:TIMES",
        help="all passes of a stage, from 0, take so many times as long: 2:1.5",
    )
    run.add_argument(
        "--jitter",
        type=_sigma,
        metavar="SIGMA",
        help="every pass takes a log-normal number of times as long, 1 in the mean",
    )
    run.add_argument("--seed", type=_seed, metavar="N", help="of the jitter (0)")
    run.add_argument(
        "--copies",
        type=_count,
        metavar="N",
        help="pipelines that jitter apart, whose all-reduces wait for the slowest (1)",
    )
    run.add_argument(
        "--blocking-messages",
        action="store_true",
        help="a message keeps the rank that sends it and the one that receives it from computing",
    )
    run.add_argument("--width", type=_width, metavar="COLUMNS", help=f"of the drawing ({WIDTH})")
    paper = parser.add_argument_group("of papers")
    paper.add_argument(
        "--paper",
        choices=(*page.SOURCES, "all", "shapes"),
        help="what they measured beside what this makes of it; network: our own benchmarks; "
        "shapes: errors with a law of the shapes of products (minutes)",
    )
    paper.add_argument("--out", metavar="FOLDER", help="write README.md and results.json there")
    parser.add_argument("--json", action="store_true", help="print data: of a run every pass")
    options, rest = parser.parse_known_args(argv)
    if options.out and not options.paper:
        raise ConfigError("--out: only --paper writes files; give both or neither")
    return options, [*config, *rest]


class _SimulateParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see tools/simulate.py --help")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _width(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= WIDEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {WIDEST:,}")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _sigma(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 10")
    return found


def _slow(text: str) -> tuple[int, float]:
    stage, _, times = text.partition(":")
    try:
        found = float(times)
    except ValueError:
        found = 0.0
    if not (stage.isascii() and stage.isdecimal()) or not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE:TIMES, as 2:1.5")
    return int(stage), found


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
