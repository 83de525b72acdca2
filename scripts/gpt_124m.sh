#!/usr/bin/env bash
# GPT-2 small on one node.
#   GRAD_PATH=dense scripts/gpt_124m.sh [--dry-run] [-- --data-path PREFIX FLAGS]
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG=${CONFIG:-$repo/configs/gpt_124m.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
exec "$repo/scripts/launch.sh" "$@"
