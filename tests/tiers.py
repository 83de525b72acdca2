"""The kind of each test, given as a mark when tests are collected, and the tests of the fast tier.

    unit     runs in the process of pytest
    ranks    runs on the rank processes of `tests.ranks`, which many tests share
    process  starts processes of its own: a launcher, a tool, a compiler, a shell
    slurm    submits jobs to a Slurm that the tests start
    docs     types the commands of README.md and docs/ into a shell

The kind follows from the code of a test and its fixtures, so that no test has to name its kind.
`fast` marks the tests that `scripts/test.sh` runs without arguments; `quiet` marks the tests that
need the machine to themselves, because a clock judges them or they start many ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.ranks import Ranks

REPO = Path(__file__).resolve().parent.parent
RANKS = {"ranks", "mpi_ranks", "device_ranks", "mpi_device_ranks"}
"""Fixtures that hand out rank processes."""
STARTERS = {"subprocess", "multiprocessing"}
BY_THE_PROGRAM = {
    "tests/bench/test_axonn_validation.py::"
    "test_smoke_compares_four_ranks_of_mpiexec_with_plain_pytorch",
    "tests/bench/test_training_runs.py::test_processes_tell_exit_codes_and_keep_what_was_said",
    "tests/bench/test_exchange.py::test_ways_are_checked_and_timed_on_ranks",
    "tests/bench/test_gpu_pipeline.py::test_a_run_that_fails_is_told",
    "tests/bench/test_gpu_pipeline.py::test_two_ranks_get_through_with_the_losses_of_one",
    "tests/bench/test_gpu_ranks.py::test_a_program_that_is_not_there_is_told",
    "tests/bench/test_gpu_ranks.py::test_a_run_that_fails_is_told",
    "tests/bench/test_gpu_ranks.py::test_a_run_that_stands_still_is_ended",
    "tests/bench/test_gpu_ranks.py::test_two_ranks_learn_as_on_cpus",
    "tests/bench/test_gradient_path.py::test_the_cost_of_a_sparse_step_is_measured",
    "tests/bench/test_gradient_path.py::test_the_tool_measures_prints_and_writes",
    "tests/bench/test_image_accuracy.py::test_runs_are_started_once_and_make_the_page",
    "tests/bench/test_message_driven.py::test_smoke_trains_alike_measures_and_draws",
    "tests/bench/test_offload.py::test_smoke_writes_both_tables",
    "tests/bench/test_pipeline.py::test_smoke_writes_what_each_schedule_takes",
    "tests/bench/test_samo_path.py::test_model_state_and_peaks_are_told",
    "tests/bench/test_samo_path.py::test_pruned_rows_are_measured",
    "tests/bench/test_samo_path.py::test_the_cost_of_a_pruned_step_is_measured",
    "tests/bench/test_samo_vision.py::test_image_networks_are_measured",
    "tests/bench/test_time_to_loss.py::test_the_tool_measures_and_writes",
    "tests/data/test_preprocess.py::test_any_number_of_workers_gives_the_same_bytes",
    "tests/data/test_workers.py",
    "tests/golden/test_golden.py",
    "tests/snapshots/test_snapshots.py",
    "tests/studies/test_execution.py::test_a_real_study_is_made_in_two_starts_and_reported",
    "tests/studies/test_execution.py::test_each_finished_model_is_scored",
    "tests/studies/test_make_text.py::test_the_tokenizer_of_the_runs_is_made_from_the_text",
    "tests/tools/test_doctor.py",
    "tests/tools/test_harness_agreement.py",
}
"""Files, or tests of them, for which the program itself starts processes. `kind_is_right` of
tests/conftest.py fails a test that starts one and is not listed."""
SAMPLE = {
    # A start by torchrun and one by mpiexec, a rank that is killed, a run that goes on.
    "tests/test_pretrain_gpt.py::test_torchrun_and_mpiexec_and_alone_give_one_curve",
    "tests/faults/test_ranks_that_fail.py::test_launcher_exits_with_the_first_causes_code",
    "tests/faults/test_damage_files.py::test_after_damage_the_run_comes_to_the_same_end",
    # The scripts, and each main tool as a program.
    "tests/test_repo.py",
    "tests/test_pretrain_gpt.py::test_help_is_complete_and_needs_nothing",
    "tests/checkpoint/test_verify_checkpoint_tool.py",
    "tests/data/test_check_data.py",
    "tests/data/test_preprocess.py::test_imports_no_torch_and_runs_from_anywhere",
    "tests/planner/test_plan_tool.py",
    "tests/report/test_compare.py",
    "tests/samo/test_prune_checkpoint.py",
    "tests/tools/test_closed_pipe.py",
    "tests/tools/test_status_tool.py",
}
"""Files, or tests of them, of the kind process that the fast tier runs."""
WHOLE_RUNS = {
    "tests/checkpoint/test_resharding.py",
    "tests/checkpoint/test_resharding_models.py",
    "tests/contract/test_nodes.py",
    "tests/low_memory/test_ledger.py",
    "tests/low_memory/test_memory_budget.py",
    "tests/low_memory/test_recompute_strategies.py",
    "tests/parallel/test_rank_order.py",
    "tests/parity/test_parity.py::test_a_grid_computes_what_one_rank_computes",
    "tests/planner/test_state.py",
    "tests/radius/test_memory.py",
    "tests/samo/test_memory.py",
    "tests/tasks/test_translation.py",
    "tests/tasks/test_vision.py",
    "tests/training/test_fp16_grids.py",
    "tests/training/test_local_steps.py",
    "tests/training/test_offload.py::test_a_run_makes_the_same_bits_and_goes_on_either_way",
    "tests/training/test_prefetch.py",
    "tests/training/test_radius.py",
    "tests/training/test_resume.py",
    "tests/training/test_resume_grids.py",
    "tests/training/test_samo.py",
    "tests/training/test_state_formats.py",
    "tests/training/test_wire.py",
    "tests/training/test_zero.py",
}
"""Whole runs and measurements, each of which takes seconds: the fast tier leaves them out."""
LONGEST = (
    "tests/docs/test_commands.py",
    "tests/pipeline/test_message_driven_runs.py",
    "tests/contract/test_contracts.py",
    "tests/test_pretrain_gpt.py",
    "tests/rehearsal/test_grids.py",
    "tests/rehearsal/test_training.py",
    "tests/parity/test_parity.py",
    "tests/test_kernel_compilation.py",
    "tests/contract/test_masks.py",
    "tests/training/test_resume_grids.py",
    "tests/training/test_offload.py",
    "tests/tasks/test_vision.py",
    "tests/checkpoint/test_resharding_models.py",
    "tests/planner/test_messages.py",
    "tests/training/test_samo.py",
    "tests/sweep/test_wrong_inputs.py",
    "tests/tools/test_doctor.py",
    "tests/parallel/test_rank_order.py",
    "tests/rehearsal/test_gpu_tests.py",
    "tests/training/test_training.py",
    "tests/pipeline/test_mpi_transport.py",
    "tests/training/test_radius.py",
    "tests/planner/test_simulate.py",
    "tests/low_memory/test_ledger.py",
)
"""Files that start first, as they take longest: a worker that begins one last keeps all waiting."""


def mark(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark every test; workers of xdist take the longest files first."""
    for item in items:
        if isinstance(item, pytest.Function):
            kind = kind_of(item)
            item.add_marker(kind)
            if is_fast(item, kind):
                item.add_marker("fast")
            folder = file_of(item).split("/")[1]
            if kind in ("process", "slurm") and folder in ("bench", "faults", "slurm"):
                item.add_marker("quiet")
    if hasattr(config, "workerinput"):
        order = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(file_of(item), len(order)))


def file_of(item: pytest.Item) -> str:
    """Return the path of a test's file below the repository."""
    return item.path.relative_to(REPO).as_posix()


def kind_of(item: pytest.Function) -> str:
    """Return the mark of the kind that a test is of."""
    file = file_of(item)
    if file == "tests/docs/test_commands.py":
        return "docs"
    if is_listed(item, BY_THE_PROGRAM):
        return "process"
    fixtures = set(_fixtures(item))
    if any(name == "cluster" for name, _ in fixtures):
        return "slurm"
    functions = [item.function, *(function for _, function in fixtures)]
    if any(starts_processes(function) for function in functions):
        return "process"
    makes_ranks = item.function.__globals__.get("Ranks") is Ranks and "Ranks" in _names(
        item.function.__code__
    )
    return "ranks" if makes_ranks or RANKS & {name for name, _ in fixtures} else "unit"


def is_fast(item: pytest.Function, kind: str) -> bool:
    """Return whether a test belongs to the fast tier."""
    if kind == "process":
        return is_listed(item, SAMPLE)
    if item.get_closest_marker("slow") or is_listed(item, WHOLE_RUNS):
        return False
    if kind == "ranks":
        # A law that is tested on one, two and four ranks is tested on two. Ranks of mpiexec and
        # ranks with a device take seconds to start.
        world = item.callspec.params.get("world", 2) if hasattr(item, "callspec") else 2
        return world == 2 and "ranks" in item.fixturenames and not is_variant(item)
    return kind == "unit"


def is_variant(item: pytest.Function) -> bool:
    """Return whether a law is tested on another case of a path than the path's first one."""
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return getattr(case, "is_variant", False)


def is_listed(item: pytest.Function, listed: set[str]) -> bool:
    """Return whether a test or its file is among those listed."""
    return not listed.isdisjoint({file_of(item), f"{file_of(item)}::{item.originalname}"})


def _fixtures(item: pytest.Function) -> Iterator[tuple[str, Any]]:
    """Yield the fixtures that a test asks for, directly or through others, and their functions."""
    given = set(item.callspec.params) if hasattr(item, "callspec") else set[str]()
    todo, seen = [name for name in item._fixtureinfo.argnames if name not in given], set[str]()
    while todo:
        name = todo.pop()
        for definition in item._fixtureinfo.name2fixturedefs.get(name, ())[-1:]:
            if name not in seen:
                seen.add(name)
                todo += definition.argnames
                yield name, definition.func


@cache
def starts_processes(function: Any) -> bool:
    """Return whether the code of a test, or the code of tests/ that it calls, starts processes.

    The rank processes of `tests.ranks` and `tests.mpi_ranks` do not count.
    """
    todo, seen = [function], set[Any]()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if isinstance(current, type):
            todo += [f for f in vars(current).values() if isinstance(f, FunctionType)]
        elif isinstance(current, FunctionType):
            names = set(_names(current.__code__))
            if names & STARTERS:
                return True
            found = [current.__globals__.get(name) for name in names]
            for module in [value for value in found if isinstance(value, ModuleType)]:
                found += [vars(module).get(name) for name in names]
            todo += [value for value in found if _is_of_tests(value)]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_tests(value: Any) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    of_ranks = file.endswith(("tests/ranks.py", "tests/mpi_ranks.py"))
    ours = file.startswith(str(REPO / "tests"))  # a folder need not be a package
    return isinstance(value, type | FunctionType) and ours and not of_ranks
