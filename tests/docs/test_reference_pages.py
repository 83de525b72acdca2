"""Tests that the pages on checkpoints, run folders and faults agree with the program."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from megatron import errors
from megatron.checkpoint import find, format, store
from megatron.checkpoint.store import Checkpoint
from megatron.config.gpt import SPECS
from megatron.data import gpt_dataset
from megatron.fault_tolerance import failures, heartbeat, loss_spikes, root_cause, watchdog
from megatron.fault_tolerance.exit_signals import ExitRequest
from megatron.fault_tolerance.run_lock import HEARTBEAT_SECONDS, STALE_SECONDS
from megatron.metrics.throughput import Throughput
from megatron.parallel.groups import ProcessGroups
from megatron.status import State
from tests.docs.documents import REPO
from tests.faults.starting import start_ranks
from tests.ranks import Ranks, grid
from tests.training.harness import TINY, train
from tools.status import MEANINGS

FORMAT = REPO / "docs" / "checkpoint-format.md"
FOLDER = REPO / "docs" / "run-folder.md"
FAULTS = REPO / "docs" / "fault-tolerance.md"
PAGES = [FORMAT, FOLDER, FAULTS]
STEPS = 3
RADIUS = "--radius-interval 2 --radius-start-iter 0"
PRUNED = f"--grad-path samo+radius --samo-pruning random {RADIUS}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page: Path, first: str) -> list[list[list[str]]]:
    """Return the rows of each table of a page whose header begins with the cell `first`."""
    found: list[list[list[str]]] = []
    inside = False
    lines = page.read_text(encoding="utf-8").splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("|"):
            inside = False
        elif following.startswith("|---"):
            inside = cells(line)[0] == first
            found += [[]] if inside else []
        elif inside and not line.startswith("|---"):
            found[-1].append(cells(line))
    return found


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def keys_of(page: Path, place: int, header: str = "Key") -> list[str]:
    """Return the names in the first column of a page's table."""
    return [name for row in tables(page, header)[place] for name in spans(row[0])]


# ---- codes, flags, times and words ---------------------------------------------------------------


def test_exit_codes_are_those_of_the_program() -> None:
    (rows,) = tables(FAULTS, "Exit code")
    named = {int(code): name.strip("`") for code, name, *_ in rows}
    kinds = {code: kind.__name__ for code, kind in errors.ERRORS_BY_CODE.items()}
    kinds |= {errors.EXIT_DONE: "EXIT_DONE", errors.EXIT_REQUEUE: "EXIT_REQUEUE"}
    unnamed = {failures.EXIT_UNEXPECTED: "", watchdog.EXIT_INTERRUPTED: ""}
    assert named == kinds | unnamed
    assert named.keys() == MEANINGS.keys()


def test_a_fault_has_a_known_exit_code_and_a_test() -> None:
    (known,) = tables(FAULTS, "Exit code")
    rows = [row for table in tables(FAULTS, "Fault") for row in table]
    assert len(rows) > 30
    for _fault, _seen, code, _do, _guarantee, shown in rows:
        assert code == "none" or set(re.findall(r"\d+", code)) <= {row[0] for row in known}, code
        assert spans(shown) and all((REPO / path).is_file() for path in spans(shown)), shown


@pytest.mark.parametrize("page", [FORMAT, FAULTS], ids=lambda page: page.stem)
def test_defaults_of_flags_are_those_of_the_configuration(page: Path) -> None:
    shown = {"None": "none", "False": "false", "True": "true"}
    defaults = {spec.flag: spec.default for spec in SPECS.values()}
    (rows,) = tables(page, "Flag")
    for flag, default, _ in rows:
        value = str(defaults[flag.strip("`")])
        assert default == shown.get(value, value), flag


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (FAULTS, f"thread on every rank looks every {watchdog.TICK:g} s"),
        (FAULTS, f"exceeds T and {watchdog.SLACK:g} s"),
        (FAULTS, f"ends its rank {watchdog.GRACE:g} s after"),
        (FAULTS, f"looks for up to {root_cause.PATIENCE:g} s for a better cause"),
        (FAULTS, f"after {STALE_SECONDS:g} s of silence"),
        (FAULTS, f"the mean of the last {loss_spikes.WINDOW} losses"),
        (FAULTS, f"every {gpt_dataset._LOOK_EVERY} samples"),
        (FOLDER, f"(every\n{watchdog.TICK:g} s)"),
        (FOLDER, f"the latest {heartbeat._CALLS} collectives"),
        (FOLDER, ", ".join(f"`{phase}`" for phase in heartbeat.PHASES[:-1])),
        (FOLDER, f"has not touched for {STALE_SECONDS:g} s"),
        (FOLDER, f"touches the file every {HEARTBEAT_SECONDS:g} s"),
        (FORMAT, f"at most {format.MANIFEST_LIMIT >> 20} MiB"),
        (FORMAT, f"exactly {format._SIGNATURE_BYTES} bytes long"),
        (FORMAT, f"The version in this page is {format.VERSION}."),
    ],
)
def test_times_and_sizes_are_those_of_the_program(page: Path, words: str) -> None:
    def plain(text: str) -> str:
        return " ".join(text.split())

    assert plain(words) in plain(page.read_text(encoding="utf-8"))


@cache
def texts_of_the_program() -> str:
    """Return all strings of the product's Python code, and its shell scripts unchanged."""
    found: list[str] = []
    for top in ("megatron", "radius", "samo"):
        for file in sorted((REPO / top).rglob("*.py")):
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            found += [
                n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is str
            ]
    found += [file.read_text(encoding="utf-8") for file in sorted((REPO / "scripts").glob("*.sh"))]
    return "\n".join(found)


def test_messages_that_are_quoted_are_the_program_s() -> None:
    rows = [row for table in tables(FAULTS, "Fault") for row in table]
    quoted = [text for row in rows for text in re.findall(r'"([^"]+)"', row[1])]
    # Text between the values, for which a page has capitals, numbers or dots.
    value = r"\.\.\.|: |\bstep_N\b|\b[A-Z]\b|\b(?:HOST|KEY|NAME)\b|\(SIGTERM\)|\btrain data\b|\d+"
    pieces = [piece.strip(" :;,=") for text in quoted for piece in re.split(value, text)]
    pieces = [piece for piece in pieces if len(piece) > 2]
    assert len(pieces) > 40
    assert [piece for piece in pieces if piece not in texts_of_the_program()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_headings_that_are_linked_to_are_there(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text(encoding="utf-8"))
    for name, anchor in links:
        target = (page.parent / name if name else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", target, re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings]
        assert anchor in slugs, f"{name}#{anchor}"


# ---- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of two ranks; SAMO and Radius have all kinds of state."""
    run_dir = tmp_path_factory.mktemp("pages") / "run"
    ended = start_ranks(2, run_dir, f"--train-iters {STEPS} {PRUNED}").finish()
    assert ended.codes == [0, 0], ended.all_stderr
    return run_dir


@pytest.fixture(scope="module")
def step(run: Path) -> Path:
    """Return the checkpoint of the run."""
    return run / "checkpoints" / f"step_{STEPS:08d}"


@pytest.mark.push
def test_a_run_folder_holds_the_files_of_the_table(run: Path) -> None:
    always, others = tables(FOLDER, "File")
    names = {name.strip("/") for row in always for name in spans(row[0])}
    # Ranks that are forks draw no picture (tests/program.py).
    assert names == {path.name for path in run.iterdir()} | {"loss.png"}
    for row in others:
        assert not any((run / name).exists() for name in spans(row[0]))


@pytest.mark.push
def test_status_has_the_keys_of_the_table(run: Path) -> None:
    written = json.loads((run / "status.json").read_text())
    assert set(keys_of(FOLDER, 0)) == set(written)
    meanings = {name: row[2] for row in tables(FOLDER, "Key")[0] for name in spans(row[0])}
    assert set(spans(meanings["throughput"])) == set(Throughput.__dataclass_fields__)
    assert set(written["throughput"]) == set(Throughput.__dataclass_fields__)
    assert spans(meanings["state"]) == list(get_args(State))
    reasons = {request.left for request in ExitRequest if request.leaves}
    assert set(spans(meanings["left"])) == reasons | {"exit-interval"}


@pytest.mark.push
def test_a_manifest_has_the_keys_of_the_tables(step: Path) -> None:
    data = (step / format.MANIFEST_NAME).read_bytes()
    written = json.loads(data)
    of_all, of_tensors, of_slices, of_state = (keys_of(FORMAT, place) for place in range(4))
    assert of_all == list(written)
    assert of_state == list(written["state"])
    records = written["tensors"].values()
    assert set(of_tensors) == {key for record in records for key in record}
    parts = [part for record in records for part in record["slices"]]
    assert set(of_slices) == {key for part in parts for key in part} | {"flat"}
    rows = {row[0]: row[1] for row in tables(FORMAT, "Key")[3]}
    progress = rows["`progress`"]
    assert all(f"`{key}`" in progress for key in written["state"]["progress"])
    assert set(written["world"]) == {"size", "tp", "dp", "pp"}
    assert data.partition(b"\n")[0] == f'{{"sha256": "{written["sha256"]}",'.encode()


@pytest.mark.push
def test_names_of_tensors_are_those_of_the_table(step: Path) -> None:
    kinds = [name for row in tables(FORMAT, "Name")[0] for name in spans(row[0])]
    patterns = [re.escape(name).replace("NAME", ".+") for name in kinds]
    shapes = [name for row in tables(FORMAT, "NAME")[0] for name in spans(row[0]) if "." in name]
    with Checkpoint.open(step) as saved:
        names = saved.names()
    assert [name for name in names if not any(re.fullmatch(p, name) for p in patterns)] == []
    parameters = {re.sub(r"\.\d+\.", ".N.", name[6:]) for name in names if name[:6] == "param/"}
    assert {name.removesuffix(".bias").removesuffix(".weight") for name in parameters} <= {
        name.removesuffix(".weight") for name in shapes
    }


@pytest.mark.push
def test_the_order_and_the_names_of_a_save_are_as_drawn(step: Path, tmp_path: Path) -> None:
    """The names shown under `checkpoints/` on the page are classified as the page says."""
    block = FORMAT.read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    for name in re.findall(r"^  (step_\S+)/", block, re.MULTILINE):
        (tmp_path / name).mkdir()
    listing = find.list_steps(tmp_path)
    assert [one.path.name for one in listing.committed] == [
        "step_00000200",
        "step_00000100",
        "step_00000100.replaced-1",
    ]
    assert [path.name for path in listing.damaged] == ["step_00000200.damaged-1"]
    assert [path.name for path in listing.drafts] == ["step_00000300.tmp-5f0c9a1e"]


# ---- the reader on the page ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_page() -> dict[str, Any]:
    """Return the names that the page's Python code defines."""
    text = FORMAT.read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, str(FORMAT), "exec"), found)
    return found


def assert_reads_alike(folder: Path, on_page: dict[str, Any]) -> set[str]:
    """Assert that the page's reader loads the program's tensors bit by bit; return their kinds."""
    with Checkpoint.open(folder) as saved:
        for name in saved.names():
            found, wanted = on_page["read_tensor"](folder, name), saved.read(name)
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
            assert torch.equal(found, wanted), name
        weights = {name: saved.read(name) for name in saved.names("param/")}
        assert weights.keys() == on_page["read_weights"](folder).keys()
        return {name.split("/")[0] for name in saved.names()}


@pytest.mark.push
def test_the_reader_reads_what_the_program_loads(step: Path, on_page: dict[str, Any]) -> None:
    kinds = assert_reads_alike(step, on_page)
    assert kinds == {"param", "exp_avg", "exp_avg_sq", "mask", "entries", "residual", "path"}


def test_the_reader_knows_every_dtype(on_page: dict[str, Any]) -> None:
    assert on_page["DTYPES"].keys() == format.DTYPE_BYTES.keys()
    assert on_page["DTYPES"] == {name: dtype for dtype, name in store.DTYPE_NAMES.items()}


def train_on(groups: ProcessGroups, flags: str, folder: Path, tp: int) -> dict[str, torch.Tensor]:
    return train(grid(groups, tp=tp), flags, folder)["state"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run")


@pytest.mark.push
@pytest.mark.parametrize(
    ("flags", "tp", "is_sharded"),
    [
        ("--use-distributed-optimizer --bf16", 1, lambda part: "flat" in part),
        ("--swiglu --vocab-size 97", 2, lambda part: "#1" in part["key"]),
        ("--grad-path powersgd", 2, lambda part: "@0:" in part["key"]),
        (
            "--exp-avg-dtype int8 --exp-avg-sq-dtype int8",
            1,
            lambda part: part["key"].startswith("exp_avg_sq_scale/"),
        ),
    ],
    ids=["sharded", "tensor-parallel", "factors", "8-bit moments"],
)
def test_the_reader_reads_slices_of_any_grid(
    ranks: Ranks, folder: Path, on_page: dict[str, Any], flags: str, tp: int, is_sharded: Any
) -> None:
    flags = f"{TINY} {flags} --train-iters {STEPS}"
    states = ranks.run(2, train_on, flags, folder, tp)
    step = folder / "checkpoints" / f"step_{STEPS:08d}"
    assert_reads_alike(step, on_page)
    records = json.loads((step / format.MANIFEST_NAME).read_text())["tensors"].values()
    assert any(is_sharded(part) for record in records for part in record["slices"])
    # The values that training ended with, on a rank that has the whole tensor.
    for name, values in states[0].items():
        whole = on_page["read_tensor"](step, name).flatten()
        if values.numel() == whole.numel():
            assert torch.equal(values, whole), name
