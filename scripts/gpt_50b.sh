#!/usr/bin/env bash
# GPT-50B of the AxoNN paper, which had NODES=32 RANKS_PER_NODE=6; 24 ranks and its
# doubles give the same batches.
# A step takes five minutes on the paper's GPUs: in a Slurm job SAVE_SECONDS must say how long a step and
# a save take, or the job ends before its run could save.
#   SAVE_SECONDS=900 NODES=32 RANKS_PER_NODE=6 scripts/gpt_50b.sh [--dry-run] [-- --data-path PREFIX FLAGS]
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG=${CONFIG:-$repo/configs/gpt_50b.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
# A message-driven pipeline talks over MPI, which torchrun does not start; a site knows its own way.
[[ -n ${SITE:-} ]] || export LAUNCHER=${LAUNCHER:-mpiexec}
exec "$repo/scripts/launch.sh" "$@"
