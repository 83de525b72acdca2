"""docs/configuration.md is what the code says: its tables, its examples, its variables."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.config.megatron_flags import MEGATRON_NAMES
from megatron.errors import ConfigError
from pretrain_gpt import GRADIENT_PATHS
from tests.docs.documents import REPO, spoken_commands
from tools import configuration

PAGE = configuration.PAGE
TEXT = PAGE.read_text(encoding="utf-8")
INTRODUCTION, _, GENERATED = TEXT.partition(configuration.MARK)
TINY = ["--config", str(REPO / "configs" / "gpt_tiny.yaml"), "--mock-data"]
REFUSED = re.findall(r"^\| `(--.+?)` \| `(.+?)` \|$", INTRODUCTION, re.MULTILINE)


def test_the_page_is_what_the_tool_writes() -> None:
    assert configuration.page(TEXT) == TEXT, "run tools/configuration.py --write"


def test_a_page_that_differs_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(configuration, "REPO", tmp_path)
    monkeypatch.setattr(configuration, "PAGE", tmp_path / "page.md")
    configuration.PAGE.write_text(TEXT.replace("`--num-layers`", "`--layers`"), encoding="utf-8")
    assert configuration.main(["--check"]) == 1
    assert "page.md is out of date" in capsys.readouterr().out
    assert configuration.main(["--write"]) == 0 and configuration.main(["--check"]) == 0
    assert configuration.PAGE.read_text(encoding="utf-8") == TEXT


def test_help_and_page_have_the_same_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for task in configuration.TASKS:
        with pytest.raises(SystemExit):
            parse(["--help"], paths=GRADIENT_PATHS, task=task)
    shown = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    tables = GENERATED.partition("\n## Settings that exclude each other\n")[0]
    rows = set(re.findall(r"^\| `(--[\w-]+)` \|", tables, re.MULTILINE))
    assert shown - {"--config", "--help-compat"} == rows


def test_every_flag_of_megatron_has_a_row() -> None:
    spans = set(re.findall(r"`(--[\w-]+)`", GENERATED))
    assert {name.flag for name in MEGATRON_NAMES} <= spans


def test_nothing_generated_reads_as_a_command() -> None:
    first = INTRODUCTION.count("\n") + 1
    lines = [int(command.place.rpartition(":")[2]) for command in spoken_commands(PAGE)]
    assert [line for line in lines if line >= first] == []
    assert "```" not in GENERATED


def test_rows_have_as_many_cells_as_their_header() -> None:
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_errors_are_those_shown(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*TINY, *flags.split()], paths=GRADIENT_PATHS)
    assert str(caught.value) == message


def test_the_error_of_the_file_is_the_one_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = re.search(r"^\| `(num_layer: 12)` in .* \| `(.+)` \|$", INTRODUCTION, re.MULTILINE)
    assert match is not None and len(REFUSED) == 5
    monkeypatch.chdir(tmp_path)
    Path("gpt.yaml").write_text(f"model:\n  {match[1]}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        parse(["--config", "gpt.yaml"], paths=GRADIENT_PATHS)
    assert str(caught.value) == match[2]


def test_the_file_that_is_shown_is_read(tmp_path: Path) -> None:
    shown = re.search(r"^ +```yaml\n(.*?)^ +```$", INTRODUCTION, re.MULTILINE | re.DOTALL)
    assert shown is not None
    file = tmp_path / "gpt.yaml"
    file.write_text(textwrap.dedent(shown[1]), encoding="utf-8")
    rest = "--num-attention-heads 12 --seq-length 64 --micro-batch-size 1 --train-iters 1"
    config = parse(["--config", str(file), "--mock-data", *rest.split()], paths=GRADIENT_PATHS)
    assert (config.model.num_layers, config.model.hidden_size) == (12, 768)
    assert (config.optimizer.lr, config.optimizer.lr_warmup_fraction) == (6e-4, None)
    assert config.precision.bf16


def test_every_variable_that_the_program_reads_has_a_row() -> None:
    files = [REPO / "megatron" / name for name in ("launch.py",)]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    read = {text for text in texts if re.fullmatch(r"RANK|CC|[A-Z]+(_[A-Z]+)+", str(text))}
    assert {"RANK", "CC", "MASTER_ADDR", "OMP_NUM_THREADS"} <= read
    assert read - set(re.findall(r"`([A-Z_]+)`", INTRODUCTION)) == set()


@pytest.mark.parametrize("script", ["launch.sh", "quickstart.sh"])
def test_every_variable_of_a_script_has_a_row(script: str) -> None:
    header = (REPO / "scripts" / script).read_text(encoding="utf-8").partition("\nset -")[0]
    read = set(re.findall(r"^#   ([A-Z_]+) ", header, re.MULTILINE))
    assert len(read) > 4
    assert read - set(re.findall(r"`([A-Z_]+)`", INTRODUCTION)) == set()


def test_a_further_task_has_tables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tasks.toy import ToyConfig

    monkeypatch.setattr(configuration, "TASKS", (*configuration.TASKS, ToyConfig))
    page = configuration.page(TEXT)
    for section in ("model", "data"):
        assert f"### {section} of pretrain_toy.py\n" in page
    assert "| `--width` | `width` |" in page
    assert "`ignored_every` with `poisoned_image`" in page
    # The shared sections are there once, and nothing of the page is lost.
    row = "| `--lr` | `lr` |"
    assert page.count(row) == TEXT.count(row) == 1
    assert set(TEXT.splitlines()) <= set(page.splitlines())
