#!/usr/bin/env bash
# Check the repository in an environment of its own: ruff, pyright, shellcheck, then pytest.
#   scripts/test.sh                      the fast tier: units, laws on two ranks, a sample of runs
#   scripts/test.sh --push               every test without the mark `full`; contracts over a
#                                        pairwise table of settings
#   scripts/test.sh --all                every test; contracts over all legal settings
#   scripts/test.sh --record             --push, then write CPU seconds to tests/durations.json
#   scripts/test.sh PYTEST ARGUMENTS     some tests, e.g. scripts/test.sh tests/data -k blended
# Ends with the seconds of each part, and but for some tests with CPU minutes by folder.
# LINT=0 leaves out all but pytest; WORKERS (3): files of tests at a time, 0 for one in order.
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

parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
failed=() seconds=() behind=()

# part NAME COMMAND: runs a part to its end.
part() {
  local name=$1 start=$SECONDS
  shift
  say "$name: $*"
  "$@" || failed+=("$name")
  seconds+=("$name $((SECONDS - start))")
}

# part_behind NAME COMMAND: starts a part beside those that follow; `join` shows what it said.
part_behind() {
  local name=$1
  shift
  say "$name, beside what follows: $*"
  (
    start=$SECONDS code=0
    "$@" >"$parts/$name.log" 2>&1 || code=$?
    echo "$code $((SECONDS - start))" >"$parts/$name.end"
  ) &
  behind+=("$name")
}

join() {
  local name code took
  wait
  for name in "${behind[@]}"; do
    say "$name"
    cat "$parts/$name.log" >&2
    read -r code took <"$parts/$name.end"
    [[ $code == 0 ]] || failed+=("$name")
    seconds+=("$name $took (beside others)")
  done
}

tests() {
  local name=$1
  shift
  python -m pytest "--cpu-seconds=$parts/$name.json" "$@"
}

# Three files at a time for two cores: many tests wait for a process. The longest of
# tests/durations.json start first; xdist would start the files with most tests first.
workers=(-n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder)
settings=() record=()
case $* in
  "") tier="not push and not full" ;;
  --push) tier="not full" ;;
  --record) tier="not full" record=(--record) ;;
  --all) tier="" settings=(--all) ;;
  *) tier=none ;;
esac
if [[ $tier != none ]]; then
  SPARSETRON_TEST_SLOWNESS=$(python -m tests.calibration "$parts/calibration.json")
  export SPARSETRON_TEST_SLOWNESS
fi
if [[ ${LINT:-1} != 0 ]]; then
  lint() {
    ruff check . && ruff format --check . &&
      shellcheck -x -P SCRIPTDIR scripts/*.sh scripts/site/*.env tools/*.sh tools/bench/*.sh \
        tools/bench/common/*.sh .ci/run
  }
  part lint lint
  part_behind types pyright --pythonpath "$venv/bin/python"
fi
if [[ $tier == none ]]; then
  part tests python -m pytest "${workers[@]}" "$@"
else
  # Jobs of Slurm and ranks that fail: most of their time is waiting.
  part_behind waiting tests waiting "${settings[@]}" -m "waits${tier:+ and $tier}" tests/faults tests/slurm
  part main tests main "${workers[@]}" "${settings[@]}" --durations 40 \
    -m "not waits${tier:+ and $tier}"
fi
join
if [[ $tier != none ]]; then
  part budget python -m tests.budget "$parts" "${settings[@]}" "${record[@]}"
fi
printf '%s s\n' "${seconds[@]}"
if ((${#failed[@]})); then
  say "failed: ${failed[*]}"
  exit 1
fi
