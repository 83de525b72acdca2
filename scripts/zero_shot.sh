#!/usr/bin/env bash
# Zero-shot scores of a trained model: the tasks of tables 4 to 6 of the Radius paper, in one table.
#   TASKS=DIR scripts/zero_shot.sh RUN [FLAGS OF tools/zero_shot.py]
# RUN is a run folder, or a model that tools/export_hf.py exported. DIR has a file for each task, such
# as DIR/piqa.jsonl; nothing is downloaded. lm-evaluation-harness scores where PYTHON finds it
# (pip install 'lm_eval[hf]'), tools/evaluate.py elsewhere.
#   scripts/zero_shot.sh --list                    the tasks, and the data sets of their files
#   TASKS=DIR scripts/zero_shot.sh RUN --only lambada_openai,piqa      these tasks alone
# Settings by environment:
#   TASKS   folder of the files of the tasks                     (data/zero_shot)
#   PYTHON  interpreter                                          (active virtual environment, or .venv, or python3)
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  show_help "${BASH_SOURCE[0]}"
  exit 0
fi
choose_python
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" "$repo/tools/zero_shot.py" --tasks-dir "${TASKS:-data/zero_shot}" "$@"
