#!/usr/bin/env bash
# A pipeline over two GPUs, the GPU tests, then tokens/s and MFU beside a plain compiled PyTorch GPT,
# on a machine with a CUDA GPU. The first thing to run on one.
#   tools/bench/gpu.sh [--smoke] [SECTION...]
# Sections (all): pipeline tests radius samo linear step124m step355m step2b. Without a section named,
# pipeline is left out where there are fewer than two GPUs.
# Needs no network and only torch, numpy, safetensors, pyyaml and triton. Each section ends within
# four minutes, pipeline within eight. Results: JSON in $OUT (gpu-bench), a table at the end.
# --smoke: tiny, CPU if need be.
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
if ((!${#sections[@]})); then
  sections=(tests radius samo linear step124m step355m step2b)
  gpus=$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)
  if ((gpus > 1 || ${#smoke[@]})); then
    sections=(pipeline "${sections[@]}")
  else
    printf '== pipeline: left out, needs two GPUs\n'
  fi
fi
mkdir -p "$out"

failed=()
section() {
  local name=$1 seconds=$limit
  shift
  if [[ $name == pipeline ]]; then seconds=$((2 * limit)); fi
  printf '== %s: %s\n' "$name" "$*"
  timeout "$seconds" "$@" || failed+=("$name (exit $?)")
}
for name in "${sections[@]}"; do
  case $name in
    pipeline)
      section pipeline "$python" -m tools.bench.gpu.pipeline --out "$out" "${smoke[@]}"
      ;;
    tests) section tests "$python" -m tools.bench.gpu.tests "${smoke[@]}" ;;
    radius | samo)
      section "$name" "$python" -m "tools.bench.gpu.${name}_kernels" --out "$out" "${smoke[@]}"
      ;;
    linear)
      section linear "$python" -m tools.bench.sparse_linear.run --out "$out" "${smoke[@]}"
      ;;
    step124m | step355m | step2b)
      section "$name" "$python" -m tools.bench.gpu.step "$name" "${options[@]}" "${smoke[@]}"
      ;;
    *)
      printf 'error: section %s: one of pipeline tests radius samo linear step124m step355m step2b\n' "$name" >&2
      exit 2
      ;;
  esac
done
"$python" -m tools.bench.gpu.step --table "$out" | tee "$out/table.md"
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
