#!/usr/bin/env bash
# GPU tests, then tokens/s and MFU beside a plain compiled PyTorch GPT, on a machine with one CUDA GPU.
#   tools/bench/gpu.sh [--smoke] [SECTION...]
# Sections (all): tests radius samo linear step124m step355m step2b
# Needs no network and only torch, numpy, safetensors, pyyaml and triton. Each section ends within
# four minutes. Results: JSON in $OUT (gpu-bench), a table at the end. --smoke: tiny, CPU if need be.
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
((${#sections[@]})) || sections=(tests radius samo linear step124m step355m step2b)
mkdir -p "$out"

failed=()
section() {
  local name=$1
  shift
  printf '== %s: %s\n' "$name" "$*"
  timeout "$limit" "$@" || failed+=("$name (exit $?)")
}
for name in "${sections[@]}"; do
  case $name in
    tests) section tests "$python" tools/bench/gpu_tests.py "${smoke[@]}" ;;
    radius | samo)
      section "$name" "$python" "tools/bench/${name}_kernels.py" --out "$out" "${smoke[@]}"
      ;;
    linear)
      section linear "$python" tools/bench/sparse_linear.py --out "$out" "${smoke[@]}"
      ;;
    step124m | step355m | step2b)
      section "$name" "$python" tools/bench/gpu_step.py "$name" "${options[@]}" "${smoke[@]}"
      ;;
    *)
      printf 'error: section %s: one of tests radius samo linear step124m step355m step2b\n' "$name" >&2
      exit 2
      ;;
  esac
done
"$python" tools/bench/gpu_step.py --table "$out" | tee "$out/table.md"
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
