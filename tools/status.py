"""Print the status of a run: state, cause of its end, progress, and the command to type next.

    python tools/status.py RUN [--json] [--verify]

Reads status.json, the lock, the heartbeats, the ends of metrics.jsonl and log.txt, the checkpoints
and, if collectives failed, the dumps of the Flight Recorder, without changing them. Imports neither
torch nor numpy, so it works on a login node. A run that status.json calls running is reported as
lost if no process holds its folder. Names, sizes and headers of a checkpoint are checked, with
--verify also every byte.

Exit code 0 if there is a status, 2 for a folder that is not a run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.find import (  # noqa: E402
    CHECKPOINTS,
    finite_step,
    list_steps,
    recorded_directory,
)
from megatron.checkpoint.format import Manifest  # noqa: E402
from megatron.checkpoint.verify import verify_folder  # noqa: E402
from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    NumericsError,
    PeerError,
    SparsetronError,
)
from megatron.fault_tolerance.flight_recorder import explain  # noqa: E402
from megatron.fault_tolerance.heartbeat import RankStatus  # noqa: E402
from megatron.fault_tolerance.root_cause import is_held, last_sign, latest_sightings  # noqa: E402
from megatron.fault_tolerance.run_lock import STALE_SECONDS  # noqa: E402
from megatron.metrics.log_line import duration, three_digits  # noqa: E402
from megatron.metrics.logger import JSONL, loss_key, parse_line  # noqa: E402
from megatron.regular_file import open_regular  # noqa: E402
from megatron.status import STATUS, Status, read_status  # noqa: E402

CONFIG, LOG = "config.yaml", "log.txt"
MEANINGS = {
    0: "as asked",
    1: "an unexpected error; its traceback is in status.json",
    2: "the configuration is wrong",
    3: "the data are wrong",
    4: "a checkpoint cannot be written or read",
    5: "the numbers went wrong",
    6: "another rank failed, or a collective did",
    75: "saved, and wants to be started again",
    130: "ended at once by a second Ctrl-C",
}
_TAIL_BYTES = 1 << 16
_RECENT = 100
"""Steps whose median is the time of a step."""


@dataclass(kw_only=True)
class Standing:
    """The facts about a run.

    `state` is running, done, left or failed as in status.json, lost (status.json says running, but
    no process runs) or unknown (no readable status.json). `heartbeat_age` is in seconds.
    """

    run: str
    state: str
    why: str = ""
    collective: str = ""
    """What the dumps of the Flight Recorder say of a run whose collectives failed."""
    exit_code: int | None = None
    meaning: str = ""
    last_step: int | None = None
    total_steps: int | None = None
    loss: float | str | None = None
    """Loss of the last step in metrics.jsonl; a string if it is not finite."""
    step_seconds: float | None = None
    seconds_left: float | None = None
    """Seconds that the missing steps of a run take that still runs."""
    job_seconds_left: float | None = None
    """Seconds to the end of the Slurm job of a run that still runs, as the job last knew it."""
    restarts: int | None = None
    """Number of times that the Slurm job went back to the queue."""
    checkpoint: str = ""
    checkpoint_step: int | None = None
    damaged: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)
    """Newer checkpoints of a run whose numbers went wrong, which no finite step followed."""
    ranks: int | None = None
    heartbeat_age: float | None = None
    host: str = ""
    job: str = ""
    told: str = ""
    """Time at which status.json was written."""
    next_command: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="status.py", description="Say how a run stands.", allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (--run-dir)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    parser.add_argument("--verify", action="store_true", help="hash the newest checkpoint")
    options = parser.parse_args(arguments)
    try:
        found = look(options.run, verify=options.verify)
    except SparsetronError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        text = f"{error.filename or options.run}: {error.strerror}"
        print(f"error: {printable(text)}", file=sys.stderr)
        return ConfigError.exit_code
    print(json.dumps(asdict(found)) if options.json else in_words(found))
    return 0


def look(run: Path, *, verify: bool = False) -> Standing:
    """Return the status of a run.

    Raises `ConfigError` for a folder that is not a run folder.
    """
    if not any((run / name).exists() for name in (STATUS, JSONL, CONFIG)):
        raise ConfigError(f"{run}: no {STATUS} there; give the folder of a run (--run-dir)")
    status = read_status(run)
    found = Standing(run=str(run), state="unknown" if status is None else status.state)
    went_wrong = status is not None and status.exit_code == NumericsError.exit_code
    recorded = _recorded_steps(run)
    finite = None
    if went_wrong:
        finite = _last_of([values for values in recorded if values.get("skipped") == 0])
    manifest = _newest_good(run, found, verify=verify, finite=finite)
    seen = latest_sightings(run, status) if status is not None else []
    found.heartbeat_age = _age(run, seen)
    if status is None:
        found.why = f"{STATUS} is missing or damaged"
    else:
        _tell(run, found, status, seen)
    steps = [one.step for one in seen] + [_last_of(recorded), found.checkpoint_step or 0]
    if status is not None and status.iteration is not None:
        found.last_step = status.iteration
    else:
        found.last_step = max(steps)
    _tell_progress(run, found, recorded)
    found.ranks = len(seen) or (manifest.world.get("size") if manifest is not None else None)
    if found.exit_code == PeerError.exit_code or found.state in ("lost", "unknown"):
        found.collective = explain(run, found.ranks)
    found.next_command = _next_command(run, found)
    return found


def _tell(run: Path, found: Standing, status: Status, seen: Sequence[RankStatus]) -> None:
    found.exit_code, found.why = status.exit_code, status.reason or status.left
    found.meaning = "" if status.exit_code is None else MEANINGS.get(status.exit_code, "")
    found.host, found.job, found.told = status.host, status.job_id, status.time
    if status.state == "failed" and status.reason:
        where = f", step {status.iteration}" if status.iteration is not None else ""
        phase = f", {status.phase}" if status.phase else ""
        found.why = f"{status.place}{where}{phase}: {' '.join(status.reason.split())}"
    if status.state == "running" and (gone := _why_lost(run, status, seen, found.heartbeat_age)):
        found.state, found.why = "lost", gone


def _why_lost(
    run: Path, status: Status, seen: Sequence[RankStatus], age: float | None
) -> str | None:
    """Return the reason if a run with the state running does not run; None if it runs."""
    if is_held(run, status):
        return None
    here = status.host == socket.gethostname()
    if not here and age is not None and age < STALE_SECONDS:
        return None
    why = "every process ended without a report: killed, or left early"
    if not here:
        why = f"no sign of life for more than {STALE_SECONDS:g} s"
    if seen:
        last = min(seen, key=lambda one: (one.phase == "receive", one.beats))
        why += f"; rank {last.rank} had made the least progress: {last}"
    return why


def _age(run: Path, seen: Sequence[RankStatus]) -> float | None:
    """Return the seconds since the last sign of life."""
    stamp = last_sign(run, seen)
    return None if stamp is None else round(max(0.0, time.time() - stamp), 1)


def _newest_good(
    run: Path, found: Standing, *, verify: bool, finite: int | None = None
) -> Manifest | None:
    """Return the manifest of the newest checkpoint that verifies.

    With `finite`, the last step that was applied, only those before the last finite step count.
    """
    folder = recorded_directory(run)
    if not folder.exists():
        return None
    listing = list_steps(folder)
    found.damaged = [path.name for path in listing.damaged]
    for step in listing.committed:
        try:
            manifest = verify_folder(step.path, hashes=verify)
        except CheckpointError as error:
            if not step.path.exists():
                # The run removed it (--keep-last) because it has saved newer ones since.
                return _newest_good(run, found, verify=verify, finite=finite)
            found.damaged.append(f"{step.path.name} ({error})")
            continue
        if finite is not None:
            finite = max(finite, finite_step(manifest.step, manifest.state))
            if step.step >= finite:
                found.doubtful.append(f"{step.path.name}: no step with a finite loss followed it")
                continue
        found.checkpoint, found.checkpoint_step = str(step.path), manifest.step
        return manifest
    return None


def _tell_progress(run: Path, found: Standing, recorded: Sequence[Mapping[str, Any]]) -> None:
    """Fill in the steps, loss and times of the run, as far as its files tell them."""
    found.total_steps = _total_steps(run)
    losses = [values[key] for values in recorded if (key := loss_key(values))]
    if losses and isinstance(losses[-1], float | str):
        found.loss = losses[-1]
    times = [values.get("step_seconds") for values in recorded[-_RECENT:]]
    if known := [seconds for seconds in times if isinstance(seconds, float)]:
        found.step_seconds = statistics.median(known)
    logs, number = run / "logs", found.job if found.job.isalnum() else ""
    if starts := _tail_of(logs / f"starts-{number}").split():
        found.restarts = len(starts) - 1
    if found.state != "running":
        return
    if found.total_steps is not None and found.step_seconds is not None:
        missing = found.total_steps - (found.last_step or 0)
        found.seconds_left = max(0.0, missing * found.step_seconds)
    end = _tail_of(logs / f"end-{number}").strip()
    if end.isdigit():
        found.job_seconds_left = max(0.0, int(end) - time.time())


def _total_steps(run: Path) -> int | None:
    """Return the length of the run in steps, as its configuration or its log tells it."""
    # A login node's Python may lack a YAML reader.
    settings = re.findall(rb"^ *train_iters: (\d{1,15})$", _tail_of(run / CONFIG), re.MULTILINE)
    logged = re.findall(rb"\biteration +\d+/ *(\d{1,15}) \|", _tail_of(run / LOG))
    told = settings or logged
    return int(told[-1]) if told else None


def _recorded_steps(run: Path) -> list[dict[str, Any]]:
    """Return the last steps and evaluations of metrics.jsonl, without torn lines."""
    lines = _tail_of(run / JSONL).splitlines(keepends=True)
    return [values for line in lines if (values := parse_line(line))]


def _last_of(recorded: Sequence[Mapping[str, Any]]) -> int:
    """Return the last step of these; 0 without any."""
    return max((int(values["iteration"] or 0) for values in recorded), default=0)


def _tail_of(path: Path) -> bytes:
    """Return the last 64 KiB of a file; nothing if it cannot be read."""
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _next_command(run: Path, found: Standing) -> str:
    """Return the command to type next, or advice with a command."""
    if found.state == "running":
        return shlex.join(["tail", "-f", str(run / LOG)])
    if found.state == "done":
        return shlex.join(["python", "tools/report.py", str(run)])
    if found.state == "failed" and "free some space" in found.why:
        # The checkpoints on disk are whole: a save without space leaves them unchanged.
        disk = shlex.join(["df", "-h", str(run), str(recorded_directory(run))])
        return f"free some space ({disk}), then: {_start_again(run, found)}"
    if found.exit_code == CheckpointError.exit_code:
        folder = recorded_directory(run)
        place = run if folder == run / CHECKPOINTS else folder
        return shlex.join(["python", "tools/verify_checkpoint.py", str(place)])
    return _start_again(run, found)


def _start_again(run: Path, found: Standing) -> str:
    """Return the command that resumes the run.

    The configuration in a run folder has every setting that the run must keep but `--save`.
    """
    if found.job and not found.doubtful:
        # The job may be in the queue again, and it may have run on several machines.
        return f"squeue -j {found.job}; if it is not there any more, submit the same again"
    if not (run / CONFIG).is_file():
        return "the command that started it"
    if found.doubtful and found.checkpoint_step is None:
        return "the command that started it, with another --run-dir"
    folder = recorded_directory(run)
    variables = {"CONFIG": str(run / CONFIG), "RUN_DIR": str(run)}
    flags = [] if folder == run / CHECKPOINTS else ["--save", str(folder)]
    if found.doubtful:
        # A run goes on from its newest checkpoint: another way from an older one is another run.
        variables["RUN_DIR"] = f"{run}-from-{found.checkpoint_step}"
        flags = ["--load", str(run), "--ckpt-step", str(found.checkpoint_step)]
        # The run may have begun with the weights of another one alone.
        flags += ["--finetune", "false", "--no-load-optim", "false"]
    # As in launch.sh; a login node's Python may lack a YAML reader.
    settings = (run / CONFIG).read_text(encoding="utf-8", errors="replace")
    if re.search(r'pipeline_schedule: "?message-driven', settings):
        variables["LAUNCHER"] = "mpiexec"
    if found.ranks is not None:
        variables["RANKS_PER_NODE"] = str(found.ranks)
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    more = f" -- {shlex.join(flags)}" if flags else ""
    return f"{' '.join(words)} scripts/launch.sh{more}"


def in_words(found: Standing) -> str:
    """Return the facts as lines of text for a terminal."""
    rows = [("run", found.run), ("state", found.state)]
    rows += [("why", found.why)] * bool(found.why)
    rows += [("collective", found.collective)] * bool(found.collective)
    if found.exit_code is not None:
        rows.append(("exit code", f"{found.exit_code}: {found.meaning}".rstrip(": ")))
    total = f" of {found.total_steps}" if found.total_steps is not None else ""
    rows.append(("last step", f"{found.last_step}{total}"))
    if found.loss is not None:
        loss = found.loss if isinstance(found.loss, str) else f"{found.loss:.4f}"
        rows.append(("loss", loss))
    if found.step_seconds is not None:
        rows.append(("step time", f"{three_digits(found.step_seconds)} s"))
    if found.seconds_left is not None:
        rows.append(("time left", f"{duration(found.seconds_left)} at this step time"))
    if found.job_seconds_left is not None:
        rows.append(("job ends", f"in {duration(found.job_seconds_left)}"))
    if found.restarts is not None:
        rows.append(("restarts", str(found.restarts)))
    good = found.checkpoint or "none"
    rows.append(("checkpoint", good))
    rows += [("damaged", text) for text in found.damaged]
    rows += [("doubtful", text) for text in found.doubtful]
    if found.heartbeat_age is not None:
        rows.append(("heartbeat", f"{found.heartbeat_age:g} s ago"))
    where = found.host + (f", job {found.job}" if found.job else "")
    rows += [("where", where)] * bool(where) + [("told", found.told)] * bool(found.told)
    if found.ranks is not None:
        rows.append(("ranks", str(found.ranks)))
    after = {2: " (once that is mended)", 3: " (once that is mended)", 5: " (with a lower --lr)"}
    rows.append(("next", found.next_command + after.get(found.exit_code or 0, "")))
    return "\n".join(f"{name:<11}{printable(text)}" for name, text in rows)


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that it cannot move the cursor."""
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape", "surrogatepass").decode()
        for mark in text
    )


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
