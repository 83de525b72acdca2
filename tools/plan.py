"""Predict memory, traffic, time and disk space of a run before it starts.

    python tools/plan.py CONFIG --world-size N [--site NAME] [--gpu KIND] [--efficiency X]
        [--json] [--paper] [--scale] [--picture FILE] [FLAGS OF pretrain_gpt.py]

Needs neither GPU nor torch. `--site`: a file in scripts/site with the machine's rates; `--gpu`: one
of its kinds of GPU; `--efficiency`: share of the GPU's peak that forward and backward reach.
Without `--world-size` one copy of the model is planned. `--paper` also prints the SAMO paper's
memory model; the paper's measurements are printed with every plan of the model that it measured.
State is counted as it is allocated, activations as autograd saves them, messages as transports keep
them; time is estimated by a model.

`--scale` prints in place of the plan what grows with the number of ranks, at 64, 1,024 and 8,192
ranks: calls, files and bytes of each step and each event, and their cost (docs/scale.md).

With `--memory-budget`, a flag of the run, the settings that some budget chooses are printed in
place of the plan, with planned peaks of the memory ledger and FLOPs. `--picture` draws them.

Exit code 0 also if the model does not fit, 2 for wrong settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config import GPTConfig, parse, resolve  # noqa: E402
from megatron.config.gpt import check_vocabulary  # noqa: E402
from megatron.data.vocabulary import data_prefixes, find_vocabulary  # noqa: E402
from megatron.data_parallel.bucket_plan import bucket_elements  # noqa: E402
from megatron.errors import ConfigError, SparsetronError  # noqa: E402
from megatron.low_memory.memory_budget import BudgetSearch  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402
from tools.planner.budget import draw_front, front_data, front_lines  # noqa: E402
from tools.planner.fit import Search, Way  # noqa: E402
from tools.planner.plan import Plan  # noqa: E402
from tools.planner.report import as_data, lines_of, stages_lines, ways_lines  # noqa: E402
from tools.planner.samo_equations import comparison, equations  # noqa: E402
from tools.planner.scale import WORLDS, rows  # noqa: E402
from tools.planner.scale import as_data as scale_data  # noqa: E402
from tools.planner.scale import lines_of as scale_lines  # noqa: E402
from tools.planner.site import GIB, Site, read_site, with_efficiency  # noqa: E402

GPT2_VOCABULARY = 50257
DEFAULT_SITE = "local"
MOST_RANKS = 100_000
"""Maximum number of ranks: more than any machine has, and few enough to plan each."""
SITES = REPO / "scripts" / "site"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    try:
        options, flags = _arguments(list(sys.argv[1:] if arguments is None else arguments))
        config = parse(flags, paths=GRADIENT_PATHS)
        if options.scale:
            if config.training.memory_budget is not None:
                raise ConfigError("--memory-budget: --scale chooses no settings; leave it out")
            print("\n".join(_scale(config, options)))
            return 0
        config = resolve(config, options.world_size or config.parallel.model_parallel_size)
        if options.paper and config.training.memory_budget is not None:
            raise ConfigError("--paper: adds to the text of a plan, which --memory-budget replaces")
        site = site_of(options)
        vocabulary, note = vocabulary_of(config)
        if options.picture is not None and config.training.memory_budget is None:
            raise ConfigError("--picture: draws what --memory-budget chooses from; give both")
        if config.training.memory_budget is not None:
            print("\n".join(_front(config, site, vocabulary, note, options)))
            return 0
        planner = Planner(site, vocabulary)
        plan = planner.plan(config, options.world_size or config.parallel.model_parallel_size)
        search = Search(plan, GRADIENT_PATHS, lambda c: planner.plan(c, plan.grid.dims.world_size))
        ways = [] if plan.fits else search.nearest()
        pruned = "samo" in config.gradient.grad_path
        fewest = {} if plan.fits and not pruned else search.fewest()
        if options.json:
            print(json.dumps(as_data(plan, ways, fewest), indent=2))
            return 0
        notes = [assumed_site(site)] * (options.site is None) + [note] * bool(note)
        print("\n".join(_text(plan, ways, fewest, notes, papers=options.paper)))
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _scale(config: GPTConfig, options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines on what grows with the number of ranks."""
    planner = Planner(site_of(options), vocabulary_of(config)[0])
    found = rows([planner.plan(resolve(config, world), world) for world in WORLDS])
    yield from [json.dumps(scale_data(found), indent=2)] if options.json else scale_lines(found)


def _front(
    config: GPTConfig, site: Site, vocabulary: int, note: str, options: argparse.Namespace
) -> Iterator[str]:
    """Yield the lines on a memory budget, after the picture is drawn that the options name."""
    budget = config.training.memory_budget
    assert budget is not None
    world = options.world_size or config.parallel.model_parallel_size
    config = config.with_values({"device": config.run.device or site.device})
    check_vocabulary(config, vocabulary)
    path = GRADIENT_PATHS[config.gradient.grad_path]
    search = BudgetSearch(config, path, world, (vocabulary,))
    if options.picture is not None:
        draw_front(options.picture, search, budget)
    if options.json:
        yield json.dumps(front_data(search, budget), indent=2)
        return
    yield from front_lines(search, budget)
    yield from [f"note: {note}"] * bool(note)


class Planner:
    """The plans of configurations on one site with one vocabulary."""

    def __init__(self, site: Site, vocabulary: int) -> None:
        self._site, self._vocabulary = site, vocabulary

    def plan(self, config: GPTConfig, world: int) -> Plan:
        """Return the plan of a resolved configuration on `world` ranks."""
        return Plan.of(
            config,
            world=world,
            path=GRADIENT_PATHS[config.gradient.grad_path],
            vocabulary=self._vocabulary,
            cap=bucket_elements(config, config.data_parallel_size(world)),
            site=self._site,
        )


def _text(
    plan: Plan,
    ways: Sequence[Way],
    fewest: Mapping[str, Way | None],
    notes: Sequence[str],
    *,
    papers: bool,
) -> Iterator[str]:
    yield from lines_of(plan)
    yield from (f"note: {note}" for note in notes)
    if not plan.fits:
        yield from ways_lines(ways)
    if fewest:
        yield ""
        yield from stages_lines(fewest)
    beside = list(comparison(plan.parameters))
    if papers:
        yield ""
        yield from equations()
    if beside:
        yield ""
        yield from beside


def site_of(options: argparse.Namespace) -> Site:
    """Return the machine that the options name, by default `DEFAULT_SITE`.

    Raises `ConfigError` for an unknown site or kind of GPU, or an efficiency outside (0, 1].
    """
    found = read_site(SITES, options.site or DEFAULT_SITE, options.gpu)
    return with_efficiency(found, options.efficiency)


def assumed_site(site: Site) -> str:
    """Return a note that says which machine is assumed."""
    others = sorted(file.stem for file in SITES.glob("*.env") if file.stem != site.name)
    return (
        f"no --site is given: nodes of {site.gpus_per_node} {site.gpu} ranks with "
        f"{site.memory / GIB:g} GiB each are assumed;\n      give --site {', '.join(others)}, or a "
        f"copy of scripts/site/{site.name}.env"
    )


def vocabulary_of(config: GPTConfig) -> tuple[int, str]:
    """Return the number of entries of the vocabulary, and a note if the number is assumed."""
    data = config.data
    try:
        prefixes = data_prefixes(data)
        missing = [p for p in prefixes if not Path(f"{p}.idx").is_file()]
        if not missing and (prefixes or data.vocab_size or data.mock_data):
            return find_vocabulary(data, prefixes).size, ""
    except ConfigError:
        pass
    if data.vocab_size:
        return data.vocab_size, ""
    return GPT2_VOCABULARY, (
        f"the data is not here to ask: a vocabulary of {GPT2_VOCABULARY:,}, GPT-2's, is assumed; "
        "give --vocab-size"
    )


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this tool, and the arguments of `pretrain_gpt.py`."""
    config = [] if not argv or argv[0].startswith("-") else ["--config", argv.pop(0)]
    parser = _PlanParser(
        usage="tools/plan.py CONFIG --world-size N [--site NAME] [--gpu KIND] [--efficiency X] "
        "[--json] [--paper] [--scale] [--picture FILE] [FLAGS OF pretrain_gpt.py]",
        description=(__doc__ or "").split("\n")[0],
        epilog="pretrain_gpt.py --help lists the flags of a run.",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=ranks, help="ranks (one copy of the model)")
    parser.add_argument("--site", help="machine, of scripts/site (local: CPU ranks)")
    parser.add_argument("--gpu", help="kind of GPU (the site's first)")
    parser.add_argument("--efficiency", type=float, help="share of peak (the site's)")
    parser.add_argument("--json", action="store_true", help="print the plan as data")
    parser.add_argument("--paper", action="store_true", help="SAMO's memory model beside ours")
    parser.add_argument("--scale", action="store_true", help="what grows with the ranks")
    parser.add_argument("--picture", type=Path, help="PNG of what a --memory-budget chooses from")
    options, rest = parser.parse_known_args(argv)
    for flag, value in (("--world-size", options.world_size), ("--picture", options.picture)):
        if options.scale and value is not None:
            raise ConfigError(f"{flag}: --scale plans its own numbers of ranks; leave it out")
    if options.paper and (options.scale or options.json):
        with_it = "--scale" if options.scale else "--json"
        raise ConfigError(f"--paper: adds to the text of a plan, which {with_it} replaces")
    return options, [*config, *rest]


class _PlanParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see tools/plan.py --help")


def ranks(text: str) -> int:
    """Return a number of ranks from its text. Raises `ArgumentTypeError`."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of ranks, from 1 to {MOST_RANKS:,}"
        )
    return int(text)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
