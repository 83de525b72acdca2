#!/usr/bin/env bash
# GPT-355M of the Radius paper, which had NODES=16 RANKS_PER_NODE=4. Any number of ranks
# that divides 64 gives the same batches; more ranks need a lower --micro-batch-size.
#   GRAD_PATH=dense scripts/gpt_355m.sh [--dry-run] [-- --data-path PREFIX FLAGS]
# Radius as in the paper, since the defaults are those of its GPT-2.0B:
#   GRAD_PATH=radius scripts/gpt_355m.sh -- --radius-density 0.5 --radius-start-iter 80000
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG=${CONFIG:-$repo/configs/gpt_355m.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
exec "$repo/scripts/launch.sh" "$@"
