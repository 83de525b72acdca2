#!/usr/bin/env bash
# Check a machine before a job is given to it: versions, disk, clock, network, settings of NCCL, and
# every collective.
#   tools/doctor.sh [RUN_DIR]          (runs/doctor; checked is the disk that it lies on)
# LAUNCHER, NODES, RANKS_PER_NODE, SITE and PYTHON are those of scripts/launch.sh, which starts the
# ranks as it would for training; without GPU, SITE and RANKS_PER_NODE there are two.
# Prints what it finds, of the environment only the names listed below. Each problem is a line
# "PROBLEM what: why"; the exit code is 0 without one, else that of the first: 2 for what is
# installed, set or mounted wrongly, 6 where ranks do not find each other or a collective fails.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  -h | --help)
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  -*)
    printf 'doctor.sh: %s: unknown; give a run folder or nothing\n' "$1" >&2
    exit 2
    ;;
esac
if (($# > 1)); then
  printf 'doctor.sh: one run folder at a time, not %d\n' "$#" >&2
  exit 2
fi
run_dir=${1:-runs/doctor}
while [[ $run_dir == ?*/ ]]; do run_dir=${run_dir%/}; done

# Python may come with a module of the site.
site=$repo/scripts/site/${SITE:-local}.env
# shellcheck source=../scripts/common.sh
source "$repo/scripts/common.sh"
refuse() {
  printf 'PROBLEM modules: %s\n' "$*"
  exit 2
}
# shellcheck disable=SC2016 # for that shell to expand
list='modules=() && source "$1" >/dev/null && ((${#modules[@]} == 0)) || printf "%s\n" "${modules[@]}"'
mapfile -t modules < <([[ ! -f $site ]] || bash -c "$list" - "$site")
load_modules "${modules[@]}"

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  for folder in "$repo/.venv" "${VIRTUAL_ENV:-}"; do
    if [[ -n $folder && -x $folder/bin/python ]]; then PYTHON=$folder/bin/python; fi
  done
fi
if ! command -v "$PYTHON" >/dev/null; then
  printf 'PROBLEM versions: PYTHON=%s: not found\n' "$PYTHON"
  exit 2
fi
export PYTHON

# By full name alone: a pattern such as SLURM_* would let tokens through.
shown=(SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_PARTITION SLURM_NNODES SLURM_NTASKS SLURM_PROCID
  SLURM_CPUS_PER_TASK SLURM_RESTART_COUNT OMP_NUM_THREADS CUDA_VISIBLE_DEVICES MASTER_ADDR
  MASTER_PORT GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_DEBUG NCCL_NET NCCL_RUNTIME_CONNECT FI_PROVIDER
  TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT
  TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_DUMP_ON_TIMEOUT
  TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_FR_DUMP_TEMP_FILE
  TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_HIGH_PRIORITY CUDA_DEVICE_MAX_CONNECTIONS
  CUDA_MODULE_LOADING LAUNCHER NODES RANKS_PER_NODE SITE)
for name in "${shown[@]}"; do
  [[ -z ${!name:-} ]] || printf 'environment  %s=%q\n' "$name" "${!name}"
done

sees_gpu() { [[ $(nvidia-smi -L 2>/dev/null || true) == GPU* ]]; }

code=0
"$PYTHON" "$repo/tools/doctor_host.py" "$run_dir" --nodes "${NODES:-1}" || code=$?
# As launch.sh starts ranks: with what the site's file sets, in a shell of its own. A site without a
# file is refused by launch.sh.
if [[ -f $site ]]; then
  (
    # shellcheck source=../scripts/site/local.env
    source "$site"
    # A run trains on the GPUs that it finds, also where no site is named.
    ! sees_gpu || DEVICE=cuda
    "$PYTHON" "$repo/tools/doctor_settings.py" --device "$DEVICE" --nodes "${NODES:-1}"
  ) || code=2
fi
# shellcheck disable=SC2016 # for that shell to expand
starts_with=${LAUNCHER:-$(bash -c 'source "$1"; echo "${LAUNCHER:-}"' - "$site" 2>/dev/null || true)}
if [[ $starts_with == sbatch && (-n ${LAUNCHER:-} || -z ${SLURM_JOB_ID:-}) ]]; then
  printf 'PROBLEM ranks: LAUNCHER=sbatch would leave a job and look at nothing; run this in an allocation (salloc)\n'
  exit 2
fi
# Ranks cannot start without what they are made of, which may be there and not load.
if ! why=$("$PYTHON" -c 'import torch' 2>&1); then
  [[ $why == *"No module named 'torch'"* ]] || printf 'PROBLEM versions: import torch: %s\n' "${why##*$'\n'}"
  exit 2
fi

if [[ -z ${RANKS_PER_NODE:-} && ${SITE:-local} == local ]] && ! sees_gpu; then
  RANKS_PER_NODE=2
fi
export RANKS_PER_NODE=${RANKS_PER_NODE:-}
# In a folder of their own: what is told there of their end is not that of a run.
own=$run_dir/doctor.$$
said=$(mktemp)
made=false
[[ -d $run_dir ]] || made=true
trap 'rm -rf "$said" "$own"; if $made; then rmdir "$run_dir" 2>/dev/null || true; fi' EXIT
ranks=0
env -u CONFIG -u GRAD_PATH PROGRAM="$repo/tools/doctor_ranks.py" RUN_DIR="$own" \
  "$repo/scripts/launch.sh" 2>"$said" || ranks=$?
if ((ranks)); then
  # launch.sh's last word, but for what it says of a start; else the last error that anybody names.
  cause=$(grep '^launch.sh: ' "$said" | grep -v 'doctor_ranks\.py\| node(s) x ' | tail -n 1 || true)
  [[ -n $cause ]] || cause=$(grep -E '[A-Za-z]+(Error|Exception): .' "$said" | tail -n 1 || true)
  [[ -n $cause ]] || cause=$(tail -n 1 "$said")
  printf 'PROBLEM ranks: %s\n' "${cause#launch.sh: }"
  ((code)) || code=$ranks
fi
((code)) || printf 'no problem found\n'
exit "$code"
