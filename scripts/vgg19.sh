#!/usr/bin/env bash
# VGG-19 of the SAMO paper, which had 16 to 128 GPUs, RANKS_PER_NODE=6 (SITE=summit).
#   GRAD_PATH=dense scripts/vgg19.sh [--dry-run] [-- --data-path FOLDER FLAGS]
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PROGRAM=${PROGRAM:-$repo/pretrain_vision.py}
export CONFIG=${CONFIG:-$repo/configs/vgg19.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
exec "$repo/scripts/launch.sh" "$@"
