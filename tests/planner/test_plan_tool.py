"""tools/plan.py as a user calls it: its output, its speed, and its refusals."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config.byte_size import show_bytes
from tests.limits import LIMIT
from tools.plan import main

pytestmark = pytest.mark.push

REPO = Path(__file__).resolve().parents[2]
GPT_2_7B = (
    "--num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048 "
    "--micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 1e-4 --fp16 "
    "--vocab-size 50257 --world-size 128 --site summit"
)
STAGES = "--pipeline-model-parallel-size"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """The tool's answer to a line of arguments: as text or, with --json, as data."""

    def plan(line: str) -> Any:
        assert main(line.split()) == 0
        found = capsys.readouterr()
        assert found.err == ""
        return json.loads(found.out) if "--json" in line else found.out

    return plan


def test_it_takes_no_torch_and_less_than_two_seconds() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import sys; from tools.plan import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    line = [*GPT_2_7B.split(), STAGES, "4"]
    done = subprocess.run(
        [sys.executable, "-c", code, *line],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert "DOES NOT FIT" in done.stdout and max(map(len, done.stdout.splitlines())) <= 100
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: a busy machine keeps it waiting for as long as it likes.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.mark.parametrize(
    "file", sorted((REPO / "configs").glob("gpt_*.yaml")), ids=lambda f: f.stem
)
def test_every_configuration_can_be_planned(file: Path, plan: Any) -> None:
    text = plan(f"{file} --site perlmutter --gpu A100-80GB")
    assert text.startswith(f"{file.stem}: ") and "time in jobs" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_interval_of_recomputation_is_told_with_eq_1_of_axonn(plan: Any) -> None:
    line = f"{REPO}/configs/gpt_12b.yaml --world-size 48 --site summit"
    text = " ".join(plan(line).split())
    assert "recomputed runs of 8 of 8 layers; by AxoNN's Eq. 1 a stage keeps 15 outputs" in text
    assert "Eq. 1" not in plan(f"{REPO}/configs/gpt_124m.yaml --site summit")


def test_the_page_has_the_table_of_what_grows_with_the_ranks(plan: Any) -> None:
    page = (REPO / "docs" / "scale.md").read_text(encoding="utf-8")
    command = page.partition("python tools/plan.py ")[2].partition("```")[0].replace("\\\n", " ")
    table = plan(command)
    assert table.rstrip() in page
    assert max(map(len, table.splitlines())) <= 101
    # What was mended does not grow faster than the ranks, and what does is listed as known.
    steep = table.partition("faster than linear")[2]
    known = page.partition("## Known")[2]
    names = [line[2:26].strip() for line in steep.splitlines()[1:]]
    assert "rendezvous of ranks" not in names and "agreements" not in names
    for name in names:
        assert name.split(",")[0].removesuffix(" to all") in known
    rows = plan(f"{command} --json")
    assert all(len(row["costs"]) == len(row["worlds"]) == 3 for row in rows)
    # Every data-parallel rank writes a residual of its own.
    manifest, radius = (
        next(row["costs"] for row in each if "manifest" in row["costs"][0]["what"])
        for each in (rows, plan(f"{command} --grad-path radius --json"))
    )
    for plain, ours in zip(manifest[1:], radius[1:], strict=True):
        assert ours["nbytes"] > 1.5 * plain["nbytes"]


def test_what_does_not_fit_is_told_what_does(plan: Any) -> None:
    found = plan(f"{GPT_2_7B} {STAGES} 4 --json")
    assert not found["fits"] and found["needed"] > found["site"]["memory"]
    ways = {way["flags"]: way for way in found["instead"]}
    for flags in ("--recompute-granularity full", f"{STAGES} 8", "--grad-path samo"):
        assert ways[flags]["needed"] <= found["site"]["memory"]
        again = plan(f"{GPT_2_7B} {STAGES} 4 {flags} --json")
        assert again["fits"] and again["needed"] == ways[flags]["needed"]
    text = plan(f"{GPT_2_7B} {STAGES} 4")
    assert "it does not fit; with these flags it does\n  --recompute-granularity full " in text


def test_changes_are_combined_where_none_does_alone(plan: Any) -> None:
    found = plan(f"{GPT_2_7B} --micro-batch-size 4 {STAGES} 4 --num-layers 64 --json")
    ways = [way["flags"] for way in found["instead"]]
    assert ways and all(flags.startswith("--recompute-granularity full ") for flags in ways)
    huge = plan(f"{GPT_2_7B} --hidden-size 25600 --json")
    assert not huge["fits"] and huge["instead"] == []
    assert "nothing near it fits" in plan(f"{GPT_2_7B} --hidden-size 25600")


def test_samo_needs_fewer_stages(plan: Any) -> None:
    """The paper's second saving (section IV): a smaller G_inter on the same GPUs."""
    text = plan(f"{GPT_2_7B} --grad-path samo {STAGES} 4")
    fewest = text.partition("fewest stages (G_inter)\n")[2].splitlines()
    said = [line.partition(" = ")[0].split() for line in fewest[:3]]
    grid = ["TP", "1", "x", "DP", "128", "x", "PP", "1"]
    assert said[0] == ["samo", "as", "it", "is", "1", *grid]
    assert said[1] == ["dense", "8", *grid[:4], "16", "x", "PP", "8"]
    assert said[2] == ["offloaded", "states", "1", *grid]
    dense = plan(f"{GPT_2_7B} {STAGES} 8 --json")
    samo = plan(f"{GPT_2_7B} --grad-path samo --json")
    assert dense["fits"] and samo["fits"]
    assert samo["seconds"]["step"] < dense["seconds"]["step"]
    assert samo["seconds"]["bubble"] == 0 < dense["seconds"]["bubble"]


def test_fewer_stages_are_found_from_message_driven_ones(plan: Any) -> None:
    """A single stage runs no pipeline's schedule: that goes with the stages."""
    line = f"{GPT_2_7B} --grad-path samo {STAGES} 8 --pipeline-schedule message-driven"
    assert plan(f"{line} --pipeline-limit 4 --json")["fewest_stages"]["samo as it is"] == 1
    dense = plan(f"{GPT_2_7B} {STAGES} 4 --json")["fewest_stages"]
    assert dense == {"dense as it is": 8, "samo at p = 0.9": 1, "offloaded states": 2}


def test_offloaded_states_are_sent_to_the_host_and_back(plan: Any) -> None:
    line = f"{GPT_2_7B} {STAGES} 8 --optimizer-cpu-offload"
    adam, sgd = (plan(f"{line} --optimizer {kind} --json")["stages"][0] for kind in ("adam", "sgd"))
    assert adam["bytes_host"] == 12 * sgd["bytes_host"] / 8 == sum(adam["host"].values())
    assert "states to the host, and as much back" in plan(line)
    assert "states to the host" not in plan(f"{GPT_2_7B} {STAGES} 8")


def test_a_host_without_room_is_told_from_a_device_without(plan: Any) -> None:
    text = plan(f"--config {REPO}/configs/gpt_100b.yaml {STAGES} 6 --world-size 6 --site vista")
    verdicts = [line.rsplit(": ", 1)[1] for line in text.splitlines() if " of " in line
                and line.endswith(("fits", "DOES NOT FIT"))]  # fmt: skip
    assert verdicts == ["fits", "DOES NOT FIT"]


def test_the_papers_memory_is_beside_ours(plan: Any) -> None:
    text = plan(f"{GPT_2_7B} --paper")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["dense"] == ["80.16", "53.0", "27.1"]
    assert rows["SAMO"] == ["20.28", "11.7", "8.6"]
    saved = [line.split()[1:] for line in text.splitlines() if line.startswith("  saved ")]
    assert saved[0][0] == "0%" and saved[0][-2:] == ["66%", "78%"], "with Adam"
    assert saved[1][0] == "0%" and saved[1][-2:] == ["62%", "75%"], "with momentum SGD"
    assert "unexplained" in text
    assert "80.16" in plan(f"{REPO}/configs/gpt_2.7b.yaml --site summit")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--world-size 0", ["--world-size", "'0'"]),
        ("--world-size 100001", ["--world-size", "'100001'", "from 1 to 100,000"]),
        (
            "--vocab-size 2 --tensor-model-parallel-size 4",
            ["vocab_size 2", "tensor_model_parallel_size 4", "2 or less"],
        ),
        ("--world-size 127 --tensor-model-parallel-size 2", ["127", "multiple of 2"]),
        ("--site moon", ["site", "'moon'", "summit"]),
        ("--site sumit", ["did you mean summit"]),
        ("--site ../site/summit", ["site"]),
        ("--gpu H100", ["gpu", "'H100'", "V100-16GB"]),
        ("--efficiency 1.5", ["efficiency", "1.5"]),
        ("--efficiency fast", ["--efficiency", "fast"]),
        ("--scale", ["--world-size", "--scale", "leave it out"]),
        ("--json --paper", ["--paper", "--json"]),
        ("--memory-budget 9GB --paper", ["--paper", "--memory-budget"]),
        ("--hidden-sice 12", ["--hidden-sice", "--hidden-size"]),
        (f"{STAGES} 64 --world-size 64", ["pipeline_model_parallel_size 64"]),
        ("--optimizer-cpu-offload --use-distributed-optimizer", ["optimizer_cpu_offload"]),
    ],
)
def test_wrong_settings_exit_2_and_say_why(
    flags: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{GPT_2_7B} {flags}".split()) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1
    assert all(word in found.err for word in words), found.err


@pytest.mark.parametrize("flags", ["--picture a.png", "--memory-budget 9GB"])
def test_what_grows_with_the_ranks_has_no_budget(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{REPO}/configs/gpt_2.7b.yaml --scale {flags}".split()) == 2
    told = capsys.readouterr().err
    assert flags.split()[0] in told and told.count("\n") == 1


def test_a_file_that_is_not_there_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such.yaml", "--world-size", "1"]) == 2
    assert "no-such.yaml" in capsys.readouterr().err


def test_a_machine_that_nobody_named_is_told(plan: Any) -> None:
    line = f"{REPO}/configs/gpt_124m.yaml --world-size 8 --grad-path radius"
    assumed = plan(line)
    assert "no --site is given: nodes of 16 cpu ranks" in assumed and "perlmutter" in assumed
    assert max(map(len, assumed.splitlines())) <= 100
    named = plan(f"{line} --site perlmutter")
    assert "no --site" not in named and "DOES NOT FIT" not in named


def test_the_order_of_the_ranks_is_told(plan: Any) -> None:
    line = f"{REPO}/configs/gpt_12b.yaml --world-size 48 --site summit"
    assert "48 ranks (tp-pp-dp), 8 node(s)" in plan(line)
    usual = plan(f"{line} --use-tp-pp-dp-mapping false --json")
    assert usual["grid"]["order"] == "tp-dp-pp"
    assert plan(f"{line} --json")["grid"]["order"] == "tp-pp-dp"


SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 48 --mock-data "
    "--vocab-size 101 --micro-batch-size 4 --global-batch-size 8 --train-iters 5 --lr 1e-3 "
    "--world-size 2"
)


def test_a_memory_budget_is_told_as_a_table_with_the_choice_marked(
    plan: Any, tmp_path: Path
) -> None:
    whole = plan(f"{SMALL} --memory-budget 1GB --json")
    peaks = [each["peak"] for each in whole["front"]]
    assert peaks == sorted(peaks, reverse=True) and len(peaks) > 4
    assert whole["chosen"] == whole["front"][0] and whole["chosen"]["flags"] == ""
    flops = [each["flops"] for each in whole["front"]]
    assert flops[0] == 1 and flops == sorted(flops)
    budget = f"{peaks[2] / 1000:.3f}kB"
    file = tmp_path / "front.png"
    lines = plan(f"{SMALL} --memory-budget {budget} --picture {file}").splitlines()
    rows, last = lines[1:-2], lines[-1]
    assert len(rows) == len(peaks)
    assert [row for row in rows if row.startswith("*")] == [rows[2]]
    assert rows[2].endswith(whole["front"][2]["flags"])
    assert last.startswith(f"{budget} takes {whole['front'][2]['flags']}, with ")
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000


def test_a_memory_budget_that_nothing_fits_is_no_error(plan: Any) -> None:
    found = plan(f"{SMALL} --memory-budget 1kB --json")
    assert found["chosen"] is None and found["budget"] == 1000
    least = found["front"][-1]["peak"]
    last = plan(f"{SMALL} --memory-budget 1kB").splitlines()[-1]
    assert last == f"nothing fits into 1kB; the smallest planned peak is {show_bytes(least)}"


def test_a_picture_needs_a_memory_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--picture", "front.png"]) == 2
    assert "give both" in capsys.readouterr().err
