"""Tests that imports go downward (see `megatron/__init__.py`) and light modules stay light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
LAYERS = (
    ("errors", "config", "launch", "status", "timers", "fault_tolerance.run_lock", "closed_pipe")
    + (
        "low_memory.checkpoint_interval",
        "processor",
        "transfer",
        "documents",
        "regular_file",
        "busy",
    ),
    ("parallel", "low_memory.activation_checkpoint"),
    ("tensor_parallel", "pipeline.schedule", "pipeline.transport", "data_parallel.bucket"),
    ("model", "data", "optimizer", "data_parallel", "low_memory", "sparse"),
    ("pipeline", "checkpoint"),
    ("training", "fault_tolerance", "checkpoint.checkpointer", "checkpoint.compatibility")
    + ("run_dir", "metrics", "report", "profiling", "memory_estimate", "preflight"),
    ("pretrain", "tasks", "low_memory.planned_memory", "low_memory.dry_run")
    + ("low_memory.recomputed_flops", "low_memory.memory_budget", "low_memory.ledger"),
)
LAYER = {f"megatron.{name}": depth for depth, names in enumerate(LAYERS) for name in names}
ENTRIES = tuple(path.stem for path in sorted(REPO.glob("pretrain_*.py")))
"""The scripts that train a task, which may name everything."""
OURS = ("megatron", "radius", "samo", "tools", *ENTRIES)
FOLDERS = ("megatron", "radius", "samo", "tools/planner")
"""Folders whose modules are checked; of `tools`, only those that load no torch."""
FOR_EXTENSIONS = (
    "megatron.config",
    "megatron.data_parallel",
    "megatron.errors",
    "megatron.parallel.tensor_shard",
    "megatron.sparse",
    "megatron.transfer",
)
WITHOUT_TORCH = (
    "megatron.errors",
    "megatron.status",
    "megatron.config",
    "megatron.launch",
    "megatron.checkpoint.find",
    "megatron.preflight",
    "megatron.parallel.dims",
    "megatron.data_parallel.bucket",
    "megatron.data_parallel.gradient_path",
    "megatron.data_parallel.layout",
    "megatron.data_parallel.reducer",
    "megatron.fault_tolerance.failures",
    "megatron.fault_tolerance.watchdog",
    "megatron.fault_tolerance.exit_signals",
    "megatron.model.flops",
    "megatron.model.image_shapes",
    "megatron.model.dc_transformer_shapes",
    "megatron.pipeline.message_driven",
    "megatron.pipeline.schedule",
    "megatron.memory_estimate",
    "megatron.data_parallel.bucket_plan",
    "megatron.low_memory.checkpoint_interval",
    "megatron.low_memory.memory_budget",
    "megatron.low_memory.operation_graph",
    "megatron.low_memory.planned_memory",
    "megatron.low_memory.recomputed_flops",
    "megatron.low_memory.strategies",
    "radius.memory",
    "radius.baselines.message_bytes",
    "megatron.data.indexed_dataset",
    "megatron.data.gpt_dataset",
    "megatron.data.blended_dataset",
    "megatron.data.sampler",
    "megatron.data.images",
    "megatron.data.pair_dataset",
    "megatron.data.preprocess_pairs",
    "megatron.data.raw_pairs",
    "megatron.checkpoint.format",
    "megatron.checkpoint.writer",
    "samo.schedule",
    "samo.memory",
    "tools.planner",
    "megatron.pretrain",
    "megatron.tasks",
    *ENTRIES,
)
WITHOUT_NUMPY = ("megatron.errors", "megatron.config", "megatron.parallel.dims")


def _modules() -> dict[str, Path]:
    files = [REPO / f"{name}.py" for name in ENTRIES]
    files += [file for folder in FOLDERS for file in (REPO / folder).rglob("*.py")]
    names = {file: file.relative_to(REPO).with_suffix("").parts for file in files if file.is_file()}
    return {".".join(n[:-1] if n[-1] == "__init__" else n): file for file, n in names.items()}


MODULES = _modules()


def _walk(node: ast.AST, at_load: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, "imports are absolute here"
            inner = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in MODULES else child.module for name in inner)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif not (at_load and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from _walk(child, at_load)


@cache
def _imports(module: str, *, at_load: bool = False) -> frozenset[str]:
    """Return the imports of a module, or only those `at_load`; annotations do not count."""
    return frozenset(_walk(ast.parse(MODULES[module].read_text(encoding="utf-8")), at_load))


@cache
def _reached(module: str, *, packages: bool = False) -> frozenset[str]:
    """Return the modules that loading `module` loads; with `packages`, parent packages too.

    Only files of this repository are followed.
    """
    seen, todo = {module}, [module]
    while todo:
        current = todo.pop()
        parent = {current.rpartition(".")[0]} - {""} if packages else set[str]()
        for name in (parent | _imports(current, at_load=True)) - seen:
            seen.add(name)
            todo += [name] if name in MODULES else []
    return frozenset(seen)


def _layer(module: str) -> int:
    """Return the layer of the longest prefix that has one."""
    while module not in LAYER:
        module = module.rpartition(".")[0]
        assert module, "add it to LAYERS here and to the map in megatron/__init__.py"
    return LAYER[module]


def _upward(module: str) -> Iterator[str]:
    """Describe the imports of a module that do not go downward."""
    top = module.split(".")[0]
    for name in _imports(module):
        if name.split(".")[0] not in OURS or top in ("tools", *ENTRIES) or name == "megatron":
            continue
        if top == "megatron":
            if not name.startswith("megatron."):
                yield f"{module} imports {name}"
            elif _layer(name) > _layer(module):
                yield f"{module} imports {name}, which is above it"
        elif name.split(".")[0] != top and not name.startswith(FOR_EXTENSIONS):
            yield f"{module} imports {name}"


# One test for each rule, whatever the number of files: a failure lists every file that breaks it.


def test_imports_go_downward() -> None:
    assert [line for module in sorted(MODULES) for line in _upward(module)] == []


def test_no_import_comes_back() -> None:
    circles = [
        f"{module} -> {name} -> {module}"
        for module in sorted(MODULES)
        for name in sorted(_imports(module, at_load=True) & MODULES.keys())
        if not module.startswith(f"{name}.") and module in _reached(name)
    ]
    assert circles == []


def test_light_modules_do_not_load_torch() -> None:
    found = []
    for light in WITHOUT_TORCH:
        names = [name for name in MODULES if f"{name}.".startswith(f"{light}.")]
        assert names, f"{light} is no module any more"
        heavy = {"torch", "numpy"} if light in WITHOUT_NUMPY else {"torch"}
        for name in names:
            loaded = {other.split(".")[0] for other in _reached(name, packages=True)}
            found += [f"{name} loads {package}" for package in sorted(loaded & heavy)]
    assert found == []
