#!/usr/bin/env bash
# GPT-3 13B of the SAMO paper, which had 256 to 2048 GPUs, RANKS_PER_NODE=6 (SITE=summit); on 16 GB it needs
# a pipeline (--pipeline-model-parallel-size), whose depth the paper does not tell.
#   GRAD_PATH=samo scripts/gpt_13b.sh [--dry-run] -- --samo-pruning early-bird [--data-path PREFIX FLAGS]
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG=${CONFIG:-$repo/configs/gpt_13b.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
exec "$repo/scripts/launch.sh" "$@"
