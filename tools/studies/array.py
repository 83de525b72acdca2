"""A study as Slurm job arrays: a task for each run, each a job of its own that can be repeated.

Runs that others fork from are in the first arrays, and the others wait until those have ended. Each
array has the runs of one number of ranks. A task calls `tools/study.py --only RUN`, so that a
second submission skips finished runs and resumes the others.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ConfigError
from megatron.status import replace_text
from tools.studies.declaration import DeclaredRun

REPO = Path(__file__).resolve().parents[2]
SITES = REPO / "scripts" / "site"
OWN_FLAGS = (
    "--array", "--dependency", "--nodes", "--ntasks", "--ntasks-per-node", "--open-mode",
    "--output",
)  # fmt: skip
"""Flags of sbatch that `submit` sets."""
PRINT_SITE_FLAGS = """
sbatch_flags=()
file=$1/${SITE:=local}.env
if [[ ! -f $file ]]; then
  cd "$1"
  echo "SITE=$SITE: no scripts/site/$SITE.env; there are:" *.env >&2
  exit 1
fi
source "$file" >/dev/null
[[ -z ${CPUS_PER_TASK:-} ]] || sbatch_flags+=("--cpus-per-task=$CPUS_PER_TASK")
((${#sbatch_flags[@]} == 0)) || printf '%s\\n' "${sbatch_flags[@]}"
"""


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """Runs of `ranks` ranks each; those of `after_bases` start once all bases have ended."""

    runs: Sequence[DeclaredRun]
    ranks: int
    after_bases: bool


def arrays_of(runs: Sequence[DeclaredRun]) -> Iterator[JobArray]:
    """Yield the arrays of these runs, those with bases first."""
    for after_bases in (False, True):
        stage = [run for run in runs if (run.fork is not None) == after_bases]
        for ranks in sorted({run.ranks for run in stage}):
            same = [run for run in stage if run.ranks == ranks]
            yield JobArray(runs=same, ranks=ranks, after_bases=after_bases)


def script_of(array: JobArray, command: Sequence[str], *, jobs: int) -> str:
    """Return the job script of an array, at most `jobs` tasks of which run at a time."""
    names = " ".join(shlex.quote(run.name) for run in array.runs)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"#SBATCH --array=0-{len(array.runs) - 1}%{jobs}",
            "#SBATCH --nodes=1",  # as launch.sh starts the ranks
            f"#SBATCH --ntasks-per-node={array.ranks}",
            "#SBATCH --open-mode=append",
            "set -euo pipefail",
            f"cd {shlex.quote(str(Path.cwd()))}",
            f"source {shlex.quote(str(REPO / 'scripts' / 'common.sh'))}",
            "load_site",
            f"runs=({names})",
            f'exec {shlex.join(command)} --only "${{runs[SLURM_ARRAY_TASK_ID]}}"',
            "",
        ]
    )


def site_flags() -> list[str]:
    """Return what the file of `SITE` asks of sbatch, with the cores of a rank.

    Raises:
        ConfigError: There is no such file, or bash cannot read it.
    """
    read = ["bash", "-euo", "pipefail", "-c", PRINT_SITE_FLAGS, "site", str(SITES)]
    done = subprocess.run(read, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(" ".join(done.stderr.split()))
    return done.stdout.splitlines()


def submit(
    runs: Sequence[DeclaredRun],
    command: Sequence[str],
    *,
    work: Path,
    jobs: int,
    flags: Sequence[str],
) -> list[str]:
    """Submit the arrays with `flags` of sbatch and return their job numbers.

    Args:
        runs: The runs to make.
        command: The command line of `tools/study.py` for this study, without `--only`.
        work: Folder of the job scripts.
        jobs: Tasks of an array that run at a time.
        flags: Further flags of sbatch, such as --partition=NAME, after those of the site.

    Raises:
        ConfigError: A flag is one that the arrays set or is not written --name=value, the site is
            unknown, or sbatch is missing or refused a script.
    """
    for flag in flags:
        name = flag.partition("=")[0]
        if not name.startswith("--") or name == "--":  # -a sets --array, and a word is a script
            raise ConfigError(f"{flag}: flags of sbatch are written --name=value")
        if any(own.startswith(name) for own in OWN_FLAGS):
            raise ConfigError(f"{flag}: --slurm sets this flag of sbatch itself")
    flags = [*site_flags(), *flags]
    (work / "console").mkdir(parents=True, exist_ok=True)
    submitted: list[str] = []
    bases: list[str] = []
    for number, array in enumerate(arrays_of(runs)):
        script = work / f"array-{number}.sh"
        replace_text(script, script_of(array, command, jobs=jobs))
        log = str((work / "console").resolve()).replace("%", "%%")
        output = [f"--output={log}/array-%A_%a.log"]
        after = [f"--dependency=afterany:{':'.join(bases)}"] if array.after_bases and bases else []
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", *output, *after, *flags, str(script)],
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            raise ConfigError("--slurm: sbatch not found; Slurm is not installed here") from None
        if done.returncode:
            before = f" (submitted before: {', '.join(submitted)})" if submitted else ""
            reason = " ".join(done.stderr.split())
            raise ConfigError(f"sbatch refused {script}: {reason}{before}")
        job = done.stdout.strip().partition(";")[0]
        submitted.append(job)
        if not array.after_bases:
            bases.append(job)
    return submitted


def own_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that calls `tools/study.py` with these arguments."""
    return [sys.executable, str(REPO / "tools" / "study.py"), *arguments]
