#!/usr/bin/env bash
# The first thing to run on a machine with a CUDA GPU: a pipeline over two GPUs, the GPU tests, every
# gradient path and grid over NCCL beside the same ranks on CPUs, kernels beside a copy, then tokens/s
# and MFU beside a plain compiled PyTorch GPT. Ranks share a GPU where there are too few.
#   tools/bench/gpu.sh [--smoke] [SECTION...]
# Sections (all): pipeline tests ranks radius samo step124m step355m step2b paths355m.
# Needs no network and only torch, numpy, safetensors, pyyaml and triton (ranks: mpiexec and mpi4py for
# one case). Each section ends within four minutes, pipeline and ranks within eight. Results: JSON in
# $OUT (gpu-bench), a table at the end. --smoke: tiny, CPU if need be.
# PYTHON (python3), OUT, PEAK_TFLOPS (989, an H200's in bf16).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
out=${OUT:-gpu-bench}
limit=240
options=(--out "$out" --peak-tflops "${PEAK_TFLOPS:-989}")
smoke=()
sections=()
for argument in "$@"; do
  if [[ $argument == --smoke ]]; then smoke=(--smoke); else sections+=("$argument"); fi
done
known=(pipeline tests ranks radius samo step124m step355m step2b paths355m)
if ((!${#sections[@]})); then sections=("${known[@]}"); fi
mkdir -p "$out"

failed=()
section() {
  local name=$1 seconds=$limit
  shift
  if [[ $name == pipeline || $name == ranks ]]; then seconds=$((2 * limit)); fi
  printf '== %s: %s\n' "$name" "$*"
  timeout -k 30 "$seconds" "$@" || failed+=("$name (exit $?)")
}
for name in "${sections[@]}"; do
  case $name in
    pipeline | ranks)
      section "$name" "$python" -m "tools.bench.gpu.$name" --out "$out" "${smoke[@]}"
      ;;
    tests) section tests "$python" -m tools.bench.gpu.tests "${smoke[@]}" ;;
    radius | samo)
      section "$name" "$python" -m "tools.bench.gpu.${name}_kernels" --out "$out" "${smoke[@]}"
      ;;
    step124m | step355m | step2b | paths355m)
      section "$name" "$python" -m tools.bench.gpu.step "$name" "${options[@]}" "${smoke[@]}"
      ;;
    *)
      printf 'error: section %s: one of %s\n' "$name" "${known[*]}" >&2
      exit 2
      ;;
  esac
done
"$python" -m tools.bench.gpu.step --table "$out" | tee "$out/table.md"
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
