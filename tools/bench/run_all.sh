#!/usr/bin/env bash
# Every benchmark that a CPU can run, into docs/benchmarks: about ten minutes on two idle cores.
#   tools/bench/run_all.sh [FLAGS of dense_step.py]
# PYTHON (python3), OUT (docs/benchmarks).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
out=${OUT:-docs/benchmarks}
# The same threads that the tool sets, so that OpenMP makes no more than are used.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
"$python" tools/bench/dense_step.py --out "$out" "$@"
