#!/usr/bin/env bash
# DC-Transformer from German to English, as Sohoni et al. 2019 train it, on one rank.
#   GRAD_PATH=dense scripts/dc_transformer_de_en.sh [--dry-run] [-- --data-path PREFIX FLAGS]
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG=${CONFIG:-$repo/configs/dc_transformer_de_en.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
exec "$repo/scripts/launch.sh" "$@"
