"""Check that a change of the code does not change what the code computes.

    python tools/golden.py compare main                        main and the working tree
    python tools/golden.py compare main --cases "radius, DP 2" bf16
    python tools/golden.py record                              after a deliberate change of numbers

`compare` trains tiny models for 20 steps in a checkout of a commit and in the working tree, on this
machine: every gradient path on one rank and over two data-, tensor- and pipeline-parallel ranks,
and every other mechanism once (tools/golden_cases.py). Losses and every tensor of the last
checkpoint must be equal to the last bit. `record` writes the losses to tests/golden/losses.json; a
test compares with them up to rounding, since bits differ between kinds of CPUs.

Exit code 0: equal, or recorded; 1: something differs or a run failed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tools.golden_cases import CASES, GoldenCase  # noqa: E402

RUNS = Path(__file__).with_name("golden_runs.py")
LOSSES = REPO / "tests" / "golden" / "losses.json"
Result = Mapping[str, Any]
"""Output of `golden_runs.py` for a case."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    if options.command == "record":
        return record(cases)
    try:
        with checkout(options.base) as tree:
            return compare(tree, REPO, cases)
    except subprocess.CalledProcessError as error:
        print(f"golden.py: {options.base}: {error.stderr.strip()}", file=sys.stderr)
        return 2


def compare(base: Path, tree: Path, cases: Sequence[GoldenCase]) -> int:
    """Run the cases in two trees, print the differences, and return the exit code."""
    before = {result["name"]: result for result in results(base, cases)}
    differing = 0
    for result in results(tree, cases):
        found = difference(before[result["name"]], result)
        differing += bool(found)
        print(f"{result['name']:<20} {found or 'equal'}", flush=True)
    print(f"{differing} of {len(cases)} differ" if differing else f"all {len(cases)} equal")
    return 1 if differing else 0


def difference(before: Result, after: Result) -> str:
    """Describe how two runs of a case differ; empty if they do not."""
    for name, result in (("before", before), ("after", after)):
        if "error" in result:
            return f"failed {name}: {result['error']}"
    told = []
    pairs = enumerate(zip(before["losses"], after["losses"], strict=False), 1)
    steps = [step for step, (old, new) in pairs if old != new]
    if len(before["losses"]) != len(after["losses"]):
        told.append(f"{len(before['losses'])} steps before, {len(after['losses'])} after")
    elif steps:
        old, new = before["losses"][steps[0] - 1], after["losses"][steps[0] - 1]
        told.append(f"losses from step {steps[0]} on ({old!r} before, {new!r} after)")
    old, new = before["tensors"], after["tensors"]
    tensors = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if tensors:
        told.append(f"{len(tensors)} of {len(old | new)} tensors, the first {tensors[0]}")
    return "; ".join(told)


def record(cases: Sequence[GoldenCase]) -> int:
    """Run the cases in this tree, write their losses to `LOSSES`, and return the exit code.

    A case that fails, or does not run, keeps its recorded losses.
    """
    stored = json.loads(LOSSES.read_text(encoding="utf-8")) if LOSSES.exists() else {}
    failed = 0
    for result in results(REPO, cases):
        print(f"{result['name']:<20} {result.get('error', 'recorded')}", flush=True)
        if "error" in result:
            failed += 1
        else:
            stored[result["name"]] = [float(f"{loss:.7g}") for loss in result["losses"]]
    stored = {case.name: stored[case.name] for case in CASES if case.name in stored}
    rows = [f"{json.dumps(name)}: {json.dumps(losses)}" for name, losses in stored.items()]
    LOSSES.parent.mkdir(exist_ok=True)
    LOSSES.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 1 if failed else 0


def results(tree: Path, cases: Sequence[GoldenCase]) -> Generator[Result]:
    """Run the cases in a tree in one process, and yield each result when its case has ended."""
    settings = json.dumps([asdict(case) | {"flags": case.command_line} for case in cases])
    with subprocess.Popen(
        [sys.executable, str(RUNS), str(tree), settings],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
    ) as process:
        assert process.stdout is not None
        missing = len(cases)
        for line in process.stdout:
            missing -= 1
            yield json.loads(line)
        assert not missing, f"{RUNS.name} ended with exit code {process.wait()}"


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a worktree of a commit in a temporary folder, and remove it afterwards.

    Raises:
        subprocess.CalledProcessError: git knows no such commit, or there is no git repository.
    """
    with tempfile.TemporaryDirectory(prefix="golden") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(REPO), *arguments], check=True, capture_output=True, text=True)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="golden.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    names = [case.name for case in CASES]
    add = commands.add_parser("compare", help="with another commit, to the last bit")
    add.add_argument("base", metavar="BASE", help="a commit, such as main")
    add.add_argument("--cases", nargs="+", choices=names, metavar="NAME", help="some of them")
    add = commands.add_parser("record", help="write tests/golden/losses.json")
    add.add_argument("--cases", nargs="+", choices=names, metavar="NAME", help="some of them")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
