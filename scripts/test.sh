#!/usr/bin/env bash
# Check the repository in an environment of its own: ruff, pyright, shellcheck, then pytest.
#   scripts/test.sh                      the fast tier: units, laws on two ranks, a sample of runs
#   scripts/test.sh --push               every test; contracts over a pairwise table of settings
#   scripts/test.sh --all                every test; contracts over all legal settings
#   scripts/test.sh PYTEST ARGUMENTS     some tests, e.g. scripts/test.sh tests/data -k blended
# LINT=0 leaves out all but pytest; WORKERS (2): files of tests at a time, 0 for one in order.
# VENV, PYTHON: see setup_env.sh.
set -euo pipefail
# shellcheck source=setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
make_environment data,log,mpi,dev
cd "$repo"
export PATH="$venv/bin:$PATH"
# Tests start several ranks at a time; more threads than cores would slow every one of them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Hundreds of processes start, each of which would compile the whole package again.
unset PYTHONDONTWRITEBYTECODE
# Nothing a test does may need or reach a model hub or a tracker's server.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline

failed=()
check() {
  say "$*"
  "$@" || failed+=("$1")
}
if [[ ${LINT:-1} != 0 ]]; then
  check ruff check .
  check ruff format --check .
  check pyright --pythonpath "$venv/bin/python"
  check shellcheck -x -P SCRIPTDIR scripts/*.sh scripts/site/*.env tools/*.sh tools/bench/*.sh \
    tools/bench/common/*.sh .ci/run
fi
# Two files at a time: many tests wait for a process, or use one core. Files start in the order of
# tests/tiers.py, which puts the longest first; xdist would start the files with most tests first.
workers=(-n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder)
if [[ $* == --push || $* == --all ]]; then
  settings=()
  [[ $* == --push ]] || settings=(--all)
  check python -m pytest "${workers[@]}" "${settings[@]}" --durations 40 -m "not quiet and not matrix"
  # What is judged by a clock or starts many ranks has the machine to itself.
  check python -m pytest -m "quiet and not matrix" tests/bench tests/faults tests/slurm
elif (($#)); then
  check python -m pytest "${workers[@]}" "$@"
else
  check python -m pytest "${workers[@]}" -m "fast and not matrix"
fi
if ((${#failed[@]})); then
  say "failed: ${failed[*]}"
  exit 1
fi
