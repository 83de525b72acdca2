"""Say what a run will take before it is started: memory, traffic, time, disk.

    python tools/plan.py CONFIG --world-size N [--site NAME] [--gpu KIND] [--efficiency X] [--json]
        [--paper] [FLAGS OF pretrain_gpt.py]

No GPU, no torch. `--site`: one of scripts/site, whose numbers the time comes from; `--gpu`: which
of its kinds of GPU; `--efficiency`: share of the GPU's peak that forward and backward reach.
Without `--world-size` it plans for one copy of the model. `--paper` prints the SAMO paper's memory
model; what it measured of a model is beside ours anyway. State is counted as it is allocated,
activations as autograd saves them, messages as transports post and keep them; time is a model.

Exit code 0 also where the model does not fit, 2 for wrong settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.config import resolve

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config import GPTConfig, parse  # noqa: E402
from megatron.data.vocabulary import data_prefixes, find_vocabulary  # noqa: E402
from megatron.errors import ConfigError, SparsetronError  # noqa: E402
from megatron.pretrain import bucket_elements  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402
from samo.memory import comparison, equations  # noqa: E402
from tools.planner.fit import Search, Way  # noqa: E402
from tools.planner.plan import Plan  # noqa: E402
from tools.planner.report import as_data, lines_of, stages_lines, ways_lines  # noqa: E402
from tools.planner.site import GIB, Site, read_site, with_efficiency  # noqa: E402

GPT2_VOCABULARY = 50257
DEFAULT_SITE = "local"
MOST_RANKS = 100_000
"""No machine has more, and a plan looks at each."""
SITES = REPO / "scripts" / "site"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    try:
        options, flags = _arguments(list(sys.argv[1:] if arguments is None else arguments))
        config = parse(flags, paths=GRADIENT_PATHS)
        config = resolve(config, options.world_size or config.parallel.model_parallel_size)
        site = site_of(options)
        vocabulary, note = vocabulary_of(config)
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


class Planner:
    """Plans configurations on one site with one vocabulary."""

    def __init__(self, site: Site, vocabulary: int) -> None:
        self._site, self._vocabulary = site, vocabulary

    def plan(self, config: GPTConfig, world: int) -> Plan:
        """Return the plan of a resolved configuration."""
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
    """The machine that the options name, or the one that is assumed where they name none."""
    found = read_site(SITES, options.site or DEFAULT_SITE, options.gpu)
    return with_efficiency(found, options.efficiency)


def assumed_site(site: Site) -> str:
    """The note on a machine that nobody named."""
    others = sorted(file.stem for file in SITES.glob("*.env") if file.stem != site.name)
    return (
        f"no --site is given: nodes of {site.gpus_per_node} {site.gpu} ranks with "
        f"{site.memory / GIB:g} GiB each are assumed;\n      give --site {', '.join(others)}, or a "
        f"copy of scripts/site/{site.name}.env"
    )


def vocabulary_of(config: GPTConfig) -> tuple[int, str]:
    """Entries of the vocabulary; and what to tell if they are a guess."""
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
    """This tool's own options, and what is left for the configuration."""
    config = [] if not argv or argv[0].startswith("-") else ["--config", argv.pop(0)]
    parser = _PlanParser(
        usage="tools/plan.py CONFIG --world-size N [--site NAME] [--gpu KIND] [--efficiency X] "
        "[--json] [--paper] [FLAGS OF pretrain_gpt.py]",
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
    options, rest = parser.parse_known_args(argv)
    return options, [*config, *rest]


class _PlanParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see tools/plan.py --help")


def ranks(text: str) -> int:
    """The number of ranks that an argument asks for."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of ranks, from 1 to {MOST_RANKS:,}"
        )
    return int(text)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
