#!/usr/bin/env bash
# GPT-2 small as the AxoNN paper validates itself (fig. 10), which had NODES=2 RANKS_PER_NODE=6; any
# even number of ranks whose half divides 60 gives the same batches.
#   RANKS_PER_NODE=12 scripts/gpt_124m_axonn.sh [--dry-run] [-- --data-path PREFIX FLAGS]
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG=${CONFIG:-$repo/configs/gpt_124m_axonn.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
# A message-driven pipeline talks over MPI, which torchrun does not start; a site knows its own way.
[[ -n ${SITE:-} ]] || export LAUNCHER=${LAUNCHER:-mpiexec}
exec "$repo/scripts/launch.sh" "$@"
