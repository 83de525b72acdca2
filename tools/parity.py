"""Check that a grid of ranks computes what one rank computes: a self-test of an installation.

    python tools/parity.py --tp 2 --pp 2                    4 ranks on this machine
    python tools/parity.py --tp 2 --pp 2 --dp 2 --sequence-parallel --paths dense radius
    python tools/parity.py --pp 2 -- --hidden-size 256      another model: flags of pretrain_gpt.py

The tool trains a few steps on one rank and on the grid, from the same weights and data, in fp32
without dropout, with SGD, since AdamW magnifies rounding. For each gradient path it prints the
largest difference of losses, of each tensor's first gradient and of its last values, relative to
the tensor's largest entry, and whether all copies of a tensor are equal to the last bit. Exit code
1 if a difference is more than rounding: 1e-5, or 1e-4 where entries are selected, since the last
bit may decide a selection. 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config import parse, resolve  # noqa: E402
from megatron.config.fields import whole_number  # noqa: E402
from megatron.errors import ConfigError  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402
from tools.parity_cases import CASES, MODEL, ParityCase, ParityGrid, flags_of  # noqa: E402

RANK = Path(__file__).with_name("parity_rank.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _arguments(given[:cut])
    grid = ParityGrid(
        tp=options.tp,
        pp=options.pp,
        dp=options.dp,
        sequence_parallel=options.sequence_parallel,
        virtual_layers=options.num_layers_per_virtual_pipeline_stage,
    )
    cases = [case for case in CASES if case.path in options.paths]
    try:
        return compare(grid, cases, extra=given[cut + 1 :])
    except ConfigError as error:
        print(f"parity.py: {error}", file=sys.stderr)
        return 2


def compare(grid: ParityGrid, cases: Sequence[ParityCase], *, extra: Sequence[str] = ()) -> int:
    """Run and compare all cases, and return the exit code."""
    from tools.parity_compare import differences

    alone = ParityGrid()
    for case in cases:
        for each in (alone, grid):
            resolve(parse(flags_of(case, each, extra), paths=GRADIENT_PATHS), each.ranks)
    print(f"{grid} against one rank; model: {' '.join(extra) or MODEL}")
    print(f"{'path':<34} {'steps':>5} {'losses':>9} {'gradients':>9} {'weights':>9}  copies")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate((alone, grid)):
            _launch(each, cases, extra, Path(folder) / str(number))
        for case in cases:
            found = differences(Path(folder) / "0", Path(folder) / "1", case)
            failed += not found.good
            print(found, flush=True)
    print("equal up to rounding" if not failed else f"{failed} of {len(cases)} differ")
    return 1 if failed else 0


def _launch(
    grid: ParityGrid, cases: Sequence[ParityCase], extra: Sequence[str], folder: Path
) -> None:
    folder.mkdir()
    settings = {
        "grid": vars(grid),
        "cases": [case.name for case in cases],
        "extra": list(extra),
        "folder": str(folder),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(grid.ranks), str(RANK), json.dumps(settings)]
    log = folder / "log"
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        print(log.read_text(encoding="utf-8")[-4000:], file=sys.stderr)
        raise SystemExit(f"{grid}: a rank failed with exit code {code}")


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="parity.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for axis, name in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        add(f"--{axis}", type=whole_number, default=1, help=f"{name}-parallel size")
    add("--sequence-parallel", action="store_true", help="as pretrain_gpt.py's")
    add("--num-layers-per-virtual-pipeline-stage", type=whole_number, default=None, metavar="N")
    paths = list(dict.fromkeys(case.path for case in CASES))
    add("--paths", nargs="+", choices=paths, default=paths, help="gradient paths")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
