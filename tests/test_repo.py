"""Tests that shipped YAML files and scripts parse, and that no code is unsafe."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.limits import LIMIT

REPO = Path(__file__).resolve().parent.parent
CONFIGS = sorted((REPO / "configs").glob("*.yaml"))
SITES = sorted((REPO / "scripts" / "site").glob("*.env"))
SCRIPTS = [
    *sorted((REPO / "scripts").glob("*.sh")),
    *sorted((REPO / "tools").glob("*.sh")),
    REPO / "tests" / "slurm" / "cluster.sh",
    REPO / ".ci" / "run",
    *SITES,
]
ENTRIES = tuple(path.name for path in sorted(REPO.glob("pretrain_*.py")))
ENTRIES = tuple(path.name for path in sorted(REPO.glob("pretrain_*.py")))
CODE = [
    file
    for top in (*ENTRIES, "megatron", "radius", "samo", "tools")
    for file in ([REPO / top] if top.endswith(".py") else sorted((REPO / top).rglob("*.py")))
    if file.is_file()
]
READS_ENVIRONMENT = (
    "megatron/fault_tolerance/flight_recorder.py",
    "megatron/launch.py",
    "megatron/status.py",
    "tools/bench/common/netlab.py",
    "tools/bench/gpu/launching.py",
    "tools/doctor_settings.py",
    "tools/evaluation/harness.py",
    "tools/golden_runs.py",
    "tools/studies/execution.py",
)
"""Files that read the environment, or set it for what they start or import."""
READS_PLAIN_PICKLES = REPO / "megatron" / "fault_tolerance" / "flight_recorder.py"
"""Reads dumps of torch, by an unpickler that refuses every class."""
PACKAGES = ("megatron", "radius", "samo", "tools", "pretrain_gpt")
UNSAFE_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
    "torch.save",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
UNSAFE_ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code"}
COLLECTIVES_OF_OBJECTS = re.compile(r"\.(all_gather|gather|broadcast|scatter)_object(_list)?$")
SHAPES = {  # layers, heads, width: GPT-2, table 1 of Radius, table I of AxoNN, GPT-3 for SAMO
    "gpt_124m": (12, 12, 768),
    "gpt_355m": (24, 16, 1024),
    "gpt_2.0b": (24, 32, 2560),
    "gpt_124m_axonn": (12, 12, 768),
    "gpt_12b": (48, 24, 4512),
    "gpt_24b": (48, 36, 6336),
    "gpt_50b": (96, 48, 6528),
    "gpt_100b": (96, 60, 9360),
    "gpt_xl": (24, 16, 2048),
    "gpt_2.7b": (32, 32, 2560),
    "gpt_6.7b": (32, 32, 4096),
    "gpt_13b": (40, 40, 5120),
}
GRIDS = {  # nodes, ranks on each: as the papers had them where a configuration asks for stages
    "gpt_124m_axonn": (2, 6),
    "gpt_12b": (8, 6),
    "gpt_24b": (16, 6),
    "gpt_50b": (32, 6),
    "gpt_100b": (64, 6),
}


def _id(file: Path) -> str:
    return str(file.relative_to(REPO))


def _shell(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script without launcher variables other than the given ones."""
    ours = ("LAUNCHER", "NODES", "RANKS_PER_NODE", "CONFIG", "GRAD_PATH", "RUN_DIR", "TIME", "SITE")
    env = {name: value for name, value in os.environ.items() if name not in ours} | environment
    return subprocess.run(
        [str(part) for part in command],
        env=env | {"PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.parametrize("file", CONFIGS, ids=_id)
def test_configuration_is_accepted(file: Path) -> None:
    from megatron.config import GPTConfig, parse
    from pretrain_gpt import GRADIENT_PATHS
    from tests.config.helpers import task_of

    config = parse(["--config", str(file)], paths=GRADIENT_PATHS, task=task_of(file))
    assert config.name == file.stem
    if isinstance(config, GPTConfig) and (wanted := SHAPES.get(file.stem)) is not None:
        model = config.model
        assert (model.num_layers, model.num_attention_heads, model.hidden_size) == wanted


def _flags_told_in(head: str) -> Iterator[tuple[str, list[str]]]:
    """Yield script and flags of each usage line, the flags without placeholders and data."""
    for names, script, rest in re.findall(r"^#   (.*?)scripts/(\w[\w.]*)\.sh (.*)$", head, re.M):
        words = shlex.split(rest.partition("-- ")[2].partition("[")[0])
        if "--data-path" in words:
            words = words[: words.index("--data-path")]
        path = re.search(r"GRAD_PATH=(\S+)", names)
        yield script, [*(["--grad-path", path[1]] if path else []), *words]


RESOLVED = {  # what runs of the papers have, by the usage lines of their scripts and configurations
    "gpt_355m": ("radius", {"density": 0.5, "interval": 200, "start_iter": 80_000}),
    **{
        name: ("samo", {"pruning": "early-bird", "sparsity": 0.9})
        for name in ("gpt_xl", "gpt_2.7b", "gpt_6.7b", "gpt_13b", "vgg19", "wide_resnet101")
    },
}


@pytest.mark.parametrize("name", RESOLVED)
def test_usage_lines_give_the_papers_settings(name: str) -> None:
    from megatron.config import parse
    from pretrain_gpt import GRADIENT_PATHS
    from tests.config.helpers import task_of

    path, wanted = RESOLVED[name]
    file = REPO / "configs" / f"{name}.yaml"
    heads = [text.read_text("utf-8") for text in (file, REPO / "scripts" / f"{name}.sh")]
    found = []
    for script, flags in (line for head in heads for line in _flags_told_in(head)):
        if script == name and flags[:2] == ["--grad-path", path]:
            line = ["--config", str(file), "--mock-data", *flags]
            config = parse(line, paths=GRADIENT_PATHS, task=task_of(file))
            options = config.extensions[path]
            found.append({key: getattr(options, f"{path}_{key}") for key in wanted})
    assert found and all(each == wanted for each in found), found


def test_each_size_has_a_configuration_and_a_script() -> None:
    sizes = {file.stem for file in CONFIGS} - {"gpt_tiny"}  # quickstart.sh is its script
    assert sizes == {file.stem for file in SCRIPTS if "export CONFIG=" in file.read_text("utf-8")}
    assert sizes >= SHAPES.keys()


def test_scripts_parse() -> None:
    wrong = []
    for file in SCRIPTS:
        wrong += [_shell("bash", "-n", file).stderr]
        sourced = file.suffix == ".env" or file.name in ("setup_env.sh", "common.sh", "slurm.sh")
        if os.access(file, os.X_OK) == sourced:
            wrong.append(f"{_id(file)}: {'is' if sourced else 'is not'} executable")
        if not sourced and "\nset -euo pipefail\n" not in file.read_text(encoding="utf-8"):
            wrong.append(f"{_id(file)}: no set -euo pipefail")
    assert [line for line in wrong if line] == []


def test_shellcheck_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.is_file() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; it comes with the dev extra")
    found = _shell(shellcheck, "-x", "-P", "SCRIPTDIR", *SCRIPTS)
    assert found.returncode == 0, found.stdout


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _complaints(file: Path) -> list[str]:
    found: list[str] = []
    environment_is_here = file in [REPO / name for name in READS_ENVIRONMENT]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
            if node.module == "os" and not environment_is_here:
                found += [a.name for a in node.names if a.name in ("environ", "getenv")]
        elif isinstance(node, ast.Global):
            found.append(f"global {', '.join(node.names)}")
        elif isinstance(node, ast.Attribute) and not environment_is_here:
            found += [n for n in [_dotted(node)] if n in ("os.environ", "os.getenv", "os.putenv")]
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in UNSAFE_CALLS or COLLECTIVES_OF_OBJECTS.search(name):
                found.append(name)
            for argument in node.keywords:
                off = isinstance(argument.value, ast.Constant) and argument.value.value is False
                if argument.arg in UNSAFE_ARGUMENTS and not off:
                    found.append(f"{name}({argument.arg}=...)")
        unsafe = UNSAFE_IMPORTS - ({"pickle"} if file == READS_PLAIN_PICKLES else set())
        found += [name for name in names if name.split(".")[0] in unsafe]
    return found


def test_code_has_no_unsafe_call_and_no_hidden_state() -> None:
    found = [f"{_id(file)}: {complaint}" for file in CODE for complaint in _complaints(file)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "eval('1')", "import yaml; yaml.load(f)", "np.load(f, allow_pickle=True)"]
    + ["subprocess.run(c, shell=True)", "import os; os.environ['A']", "def f():\n global x"],
)
def test_the_check_above_sees_what_it_forbids(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(text)
    assert _complaints(tmp_path / "x.py")


def _imports_before_the_path(text: str) -> list[str]:
    """Return the modules of this project that a script imports before it names its own checkout."""
    found: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("sys.path.insert(0, "):
            return found
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in PACKAGES:
            found.append(str(node.module))
    return found


@pytest.mark.parametrize("file", sorted((REPO / "tools").glob("*.py")), ids=_id)
def test_a_tool_imports_its_own_checkout(file: Path) -> None:
    # An installed checkout would otherwise serve some imports, and this one the others.
    text = file.read_text(encoding="utf-8")
    assert "__main__" not in text or _imports_before_the_path(text) == []


def test_the_check_above_sees_an_early_import() -> None:
    late = "import sys\nsys.path.insert(0, here)\nfrom megatron.config import parse\n"
    assert _imports_before_the_path(late) == []
    early = "from megatron.config import resolve\n" + late
    assert _imports_before_the_path(early) == ["megatron.config"]


def test_dependencies() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[\[<>=; ]", line)[0] for line in project["dependencies"]}
    assert names == {"torch", "numpy", "safetensors", "pyyaml", "tqdm"}
    pins = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins if line[0] != "#"}
    assert all(re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line) for line in pins)
    wanted = set(project["dependencies"])
    for extra in project["optional-dependencies"].keys() - {"gpu"}:
        wanted |= set(project["optional-dependencies"][extra])
    assert {re.split(r"[\[<>=; ]", line)[0].lower() for line in wanted} <= pinned


def test_hooks_fetch_nothing() -> None:
    hooks = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks["repos"][0]["hooks"]} == {"system"}


def test_a_python_that_is_not_installed_to_the_end_is_one_line(tmp_path: Path) -> None:
    """Ranks that srun starts may be in a container: the Python outside only reads settings."""
    (tmp_path / "packages").mkdir()
    for package in ("numpy", "numpy.libs", "yaml"):
        (tmp_path / "packages" / package).symlink_to(Path(yaml.__file__).parent.parent / package)
    python = tmp_path / "python"
    # -S leaves out all installed packages.
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path}/packages:$PYTHONPATH exec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    flags = ["--dry-run", "--", "--config", REPO / "configs" / "gpt_tiny.yaml", "--mock-data"]
    launch = ["env", f"PYTHON={python}", REPO / "scripts" / "launch.sh", *flags]
    refused = _shell(*launch)
    assert refused.returncode == 2 and refused.stdout == "", refused.stderr
    assert refused.stderr == (
        f"launch.sh: PYTHON={python}: lacks torch, safetensors, tqdm; finish its "
        "installation (pip install .), or set PYTHON to another\n"
    )
    outside = _shell(*launch, "--vocab-size", "64", LAUNCHER="srun")
    assert outside.returncode == 0 and f"{python} {REPO}" in outside.stdout, outside.stderr


def test_quickstart_shows_its_help_and_refuses_an_absent_python(tmp_path: Path) -> None:
    script = REPO / "scripts" / "quickstart.sh"
    shown = _shell(script, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "scripts/quickstart.sh [FLAGS OF pretrain_gpt.py]" in shown.stdout
    assert "set -euo" not in shown.stdout
    (tmp_path / "bin").mkdir()  # an existing environment
    for name in ("python", "pip"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    refused = _shell("env", "PYTHON=nope", script, VENV=str(tmp_path), DATA=str(tmp_path / "data"))
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr == "quickstart.sh: PYTHON=nope: not found\n"


def test_an_environment_that_others_made_is_left_alone(tmp_path: Path) -> None:
    """The environment's Python may only be an environment module that is not loaded."""
    (tmp_path / "pyvenv.cfg").write_text("home = /nowhere\n")
    refused = _shell(REPO / "scripts" / "test.sh", VENV=str(tmp_path))
    assert refused.returncode == 2 and "no Python 3.11 with pip starts in it" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pyvenv.cfg"]


LAUNCH = REPO / "scripts" / "launch.sh"
PROGRAM = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
rank = os.environ.get("RANK", "0")
(folder / f"rank{rank}.json").write_text(json.dumps(sys.argv[1:]))
code = int(os.environ.get("CODE", "0"))
if rank == "0" and code:
    status = {"exit_code": code, "state": "failed", "rank": 0, "reason": "the cause\\nof it"}
    (folder / "status.json").write_text(json.dumps(status))
# torchrun ends the others when the first one leaves.
ranks = int(os.environ.get("WORLD_SIZE", "1"))
needed = [*(f"rank{rank}.json" for rank in range(ranks)), "status.json"]
while code and not all((folder / name).exists() for name in needed):
    time.sleep(0.01)
sys.exit(code)
"""


def test_launcher_passes_names_with_blanks_and_dollars(tmp_path: Path) -> None:
    program = tmp_path / "a program.py"
    program.write_text(PROGRAM)
    run = tmp_path / "$(touch canary) and `touch canary`" / "run-1"
    flag = "$(touch canary); touch canary"
    done = _shell(LAUNCH, "--", "--data-path", flag, PROGRAM=str(program), RUN_DIR=str(run))
    assert done.returncode == 0, done.stderr
    passed = yaml.safe_load((run / "rank0.json").read_text())
    assert passed == ["--run-dir", str(run), "--data-path", flag]
    assert not list(tmp_path.rglob("canary")) and not (REPO / "canary").exists()


@pytest.mark.push
def test_torchrun_leaves_with_the_code_of_status_json(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {"PROGRAM": str(program), "RANKS_PER_NODE": "2", "RUN_DIR": str(tmp_path / "run")}
    failed = _shell(LAUNCH, CODE="75", **environment)
    assert failed.returncode == 75
    assert failed.stderr.splitlines()[-1] == "launch.sh: rank 0: the cause of it"
    assert (tmp_path / "run" / "rank1.json").is_file()
    # Ranks that are killed once the run is done, as in the drawing of its report, change nothing.
    lines = PROGRAM.replace('"failed"', '"done"').replace('"exit_code": code', '"exit_code": 0')
    program.write_text(lines.replace("sys.exit(code)", "os.kill(os.getpid(), 9)"))
    done = _shell(LAUNCH, CODE="75", **environment)
    assert done.returncode == 0, done.stderr
    # A file of an earlier start says nothing about this start.
    program.write_text("import sys; sys.exit(3)")
    failed = _shell(LAUNCH, **environment)
    assert failed.returncode == 1 and "the cause" not in failed.stderr


PATHS = ("dense", "samo", "radius", "samo+radius")


def _path(name: str) -> str:
    """Return a gradient path for the model; models take turns, with two choices for offloading."""
    number = list(SHAPES).index(name)
    return PATHS[number % (2 if name in GRIDS else 4)]


@pytest.mark.parametrize(("name", "path"), [(name, _path(name)) for name in SHAPES])
def test_dry_run_prints_the_job_script_alone(name: str, path: str, tmp_path: Path) -> None:
    script = REPO / "scripts" / f"{name}.sh"
    nodes, ranks = GRIDS.get(name, (1, 1))
    environment = {"NODES": str(nodes), "RANKS_PER_NODE": str(ranks), "GRAD_PATH": path}
    elsewhere = ("--check-paths", "false")
    shown = _shell(script, "--dry-run", "--", "--data-path", "my data", *elsewhere, **environment)
    assert shown.returncode == 0, shown.stderr
    job = tmp_path / "job.sh"
    job.write_text(shown.stdout)
    assert shown.stdout.startswith("#!/usr/bin/env bash\n")
    assert _shell("bash", "-n", job).returncode == 0
    for part in (f"{name}.yaml", f"--grad-path {path}", f"runs/{name}", r"my\ data"):
        assert part in shown.stdout
    if name in GRIDS:
        assert f"mpiexec -n {nodes * ranks} " in shown.stdout


def test_a_job_script_has_the_variables_of_mpi() -> None:
    environment = {"LAUNCHER": "sbatch", "MPIEXEC": "/opt/mpi/mpiexec", "SLURM_MPI_TYPE": "pmix"}
    flags = ("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1")
    flags += ("--seq-length", "8", "--micro-batch-size", "1", "--mock-data", "--lr", "1")
    shown = _shell(LAUNCH, "--dry-run", "--", *flags, "--train-iters", "1", **environment)
    assert shown.returncode == 0, shown.stderr
    for line in ("export MPIEXEC=/opt/mpi/mpiexec", "export SLURM_MPI_TYPE=pmix"):
        assert line in shown.stdout.splitlines()


def test_dry_run_checks_the_flags() -> None:
    script = REPO / "scripts" / "gpt_124m.sh"
    refused = _shell(script, "--dry-run", "--", "--mock-data", "--num-layer", "3")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--num-layers" in refused.stderr and refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LAUNCHER", "ssh"),
        ("SITE", "../local"),
        ("SITE", "nowhere"),
        ("NODES", "0"),
        ("RANKS_PER_NODE", "a[$(id)]"),
        ("RUN_DIR", "runs/$(id)"),
        ("RUN_DIR", "runs/.."),
    ],
)
def test_launcher_refuses_in_one_line(name: str, value: str) -> None:
    refused = _shell(LAUNCH, "--dry-run", **{name: value})
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.count("\n") == 1 and f"{name}={value}" in refused.stderr
