#!/usr/bin/env bash
# WRN-28-2 on CIFAR-10, as Sohoni et al. 2019 train it, on one rank.
#   GRAD_PATH=dense scripts/wrn28_2_cifar10.sh [--dry-run] [-- --data-path FOLDER FLAGS]
# Other variables: see launch.sh.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PROGRAM=${PROGRAM:-$repo/pretrain_vision.py}
export CONFIG=${CONFIG:-$repo/configs/wrn28_2_cifar10.yaml}
export GRAD_PATH=${GRAD_PATH:-dense} NODES=${NODES:-1} TIME=${TIME:-24:00:00}
exec "$repo/scripts/launch.sh" "$@"
