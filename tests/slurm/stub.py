"""Stands in for pretrain_gpt.py where only the end of a start matters.

    --plan CODE[+][!][:LEFT],...   what each start of the job does, the last one again and again
    --elsewhere                    save beside the run folder, as a YAML file may ask

CODE is the exit code; + commits a step first, ten after that of the start before; with ! a rank has
vanished from this node; LEFT is what status.json says it left for.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.checkpoint.find import CHECKPOINTS, ENVIRONMENT, SAVE  # noqa: E402
from megatron.status import State, Status, node_name, write_status  # noqa: E402

STATES: dict[int, State] = {0: "done", 75: "left"}

if __name__ == "__main__":
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    plan = sys.argv[sys.argv.index("--plan") + 1].split(",")
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    match = re.fullmatch(r"(\d+)(\+?)(!?)(?::([\w-]+))?", plan[min(start, len(plan) - 1)])
    assert match is not None
    code, step = int(match[1]), 10 * (start + 1)
    folder = run_dir / CHECKPOINTS
    if "--elsewhere" in sys.argv:
        folder = run_dir.with_name(f"saves of {run_dir.name}")
        (run_dir / ENVIRONMENT).write_text(json.dumps({SAVE: str(folder)}))
    if match[2]:
        (folder / f"step_{step:08d}").mkdir(parents=True)
    state = STATES.get(code, "failed")
    reason, lost, left = f"as planned: {code}", bool(match[3]), match[4] or ""
    status = Status(state=state, exit_code=code, left=left, reason=reason, lost=lost)
    write_status(run_dir, replace(status, node=node_name()))
    sys.exit(code)
