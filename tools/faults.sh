#!/usr/bin/env bash
# The whole fault matrix: every fault in every phase, detected, named and recovered from. Minutes.
#   tools/faults.sh [PYTEST ARGUMENTS]     e.g. tools/faults.sh -k kill
# Prints a table (fault, trials, detected, recovered, longest seconds) and exits with pytest's code.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x $repo/.venv/bin/python ]]; then python=$repo/.venv/bin/python; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$repo"
results=$(mktemp)
trap 'rm -f "$results"' EXIT
code=0
# A test of the matrix may kill a run at dozens of places.
"$python" -m pytest tests/faults -q --timeout 3600 \
  -o junit_family=xunit1 --junitxml="$results" "$@" || code=$?
"$python" tools/faults_table.py "$results"
exit "$code"
