"""Rows keep their numbers in a file, and a row that was changed is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from tests.studies.files import row
from tools.studies.rows import (
    LATER,
    StudyRow,
    digest,
    read_rows,
    row_of,
    write_row,
    write_rows,
)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [row("dense", 1, 5.0), row("dense", 2, None)]
    write_rows(tmp_path / "results.jsonl", rows)
    found = read_rows(tmp_path / "results.jsonl")
    assert [each.line for each in found] == [each.line for each in rows]
    write_row(tmp_path / "rows" / "one.json", rows[0])
    assert read_rows(tmp_path / "rows" / "one.json")[0].name == "dense-seed1"
    assert read_rows(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"valid_loss": 5.0', '"valid_loss": 4.0', ":1: the row was changed"),
        ('"seed": 1, ', "", ":1: the row was changed"),
        ("{", "", ":1: no row of a study"),
        ("{", "[{", ":1: no row of a study"),
    ],
)
def test_a_changed_row_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(row("dense", 1, 5.0).line.replace(old, new) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_rows(path)


def test_a_second_row_of_a_run_is_refused(tmp_path: Path) -> None:
    """A merge of two branches may leave it, and the next start would drop one of them."""
    path = tmp_path / "results.jsonl"
    write_rows(path, [row("dense", 1, 5.0), row("dense", 2, 5.1), row("dense", 1, 5.2)])
    with pytest.raises(ConfigError, match=r"results.jsonl:3: a second row of dense-seed1"):
        read_rows(path)


def run_folder(folder: Path) -> Path:
    """Write the metrics of 40 steps; from the 11th the run sends a tenth."""
    folder.mkdir()
    lines = [
        {
            "iteration": step,
            "lm_loss": 8 - step / 10,
            "grad_norm": 2.0 if step % 2 else 0.5,
            "step_seconds": 0.5 if step > 10 else 2.0,
            "bytes_sent": 100 if step > 10 else 1000,
            "density": 0.1 if step > 10 else 1.0,
            "peak_memory_bytes": 1000 + step,
            "tokens": 64,
            "tokens_per_second": 1.0,
        }
        for step in range(1, 41)
    ]
    lines.append({"iteration": 40, "valid_loss": 4.25})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def row_from(folder: Path, *, first_step: int) -> StudyRow:
    return row_of(
        folder,
        name="a-seed1",
        group="a",
        seed=1,
        ranks=2,
        data_parallel=2,
        settings="0",
        exit_code=0,
        first_step=first_step,
        clip=1.0,
        scores={},
        flags={"lr": 1.0e-3, "global-batch-size": 4, "seed": 1},
        cores=2,
    )


def test_a_row_counts_the_steps_of_the_run_itself(tmp_path: Path) -> None:
    found = row_from(run_folder(tmp_path / "run"), first_step=11)
    assert (found.bytes, found.most_bytes, found.density) == (100, 100, 0.1)
    assert (found.step_seconds, found.seconds, found.steps) == (0.5, 15.0, 40)
    assert (found.clipped, found.peak_memory, found.valid_loss) == (0.5, 1040, 4.25)
    assert found.train_loss == pytest.approx((4.1 + 4.0) / 2)
    assert found.curve[0] == (1, 7.9) and found.curve[-1] == (40, 4.0)


def test_a_row_holds_what_the_run_was_made_with(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    packages = {"sparsetron": "1.0", "torch": "2.9.1+cpu", "numpy": "2.0"}
    (folder / "environment.json").write_text(json.dumps({"packages": packages}), encoding="utf-8")
    found = row_from(folder, first_step=11)
    assert found.flags == {"lr": 1.0e-3, "global-batch-size": 4, "seed": 1}
    assert (found.torch, found.cores) == ("2.9.1+cpu", 2)
    write_rows(tmp_path / "rows.jsonl", [found])
    assert [each.line for each in read_rows(tmp_path / "rows.jsonl")] == [found.line]


@pytest.mark.parametrize("keys", [("flags", "torch", "cores"), tuple(LATER)])
def test_an_older_row_keeps_its_line(tmp_path: Path, keys: tuple[str, ...]) -> None:
    content = json.loads(row("dense", 1, 5.0).line)
    for key in (*keys, "sha256"):
        del content[key]
    line = json.dumps({**content, "sha256": digest(content)})
    path = tmp_path / "results.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    write_rows(path, [*read_rows(path), row("dense", 2, 5.0)])
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert first == line and '"torch": ""' in second
    older = read_rows(path)[0]
    assert (older.scores, older.flags, older.torch, older.cores) == ({}, {}, "", 0)


def test_a_run_without_a_step_of_its_own_has_no_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="records no step of the run"):
        row_from(run_folder(tmp_path / "run"), first_step=41)
