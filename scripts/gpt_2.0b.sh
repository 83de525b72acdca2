#!/usr/bin/env bash
# GPT-2.0B of the Radius paper, which had NODES=16 RANKS_PER_NODE=4. Any number of ranks
# that divides 64 gives the same batches; more ranks need a lower --micro-batch-size.
#   GRAD_PATH=dense scripts/gpt_2.0b.sh [--dry-run] [-- --data-path PREFIX FLAGS]
# A GPU of 40 GB does not hold the model; nodes of Perlmutter with 80 GB, as the paper had:
#   SITE=perlmutter NODES=16 scripts/gpt_2.0b.sh '--constraint=gpu&hbm80g' -- --data-path PREFIX
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG=${CONFIG:-$repo/configs/gpt_2.0b.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
exec "$repo/scripts/launch.sh" "$@"
