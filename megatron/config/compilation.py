"""The choice whether torch.compile compiles the layers of a model, with the reason."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from megatron.launch import finds_compiler
from megatron.low_memory.checkpoint_interval import runs_by_operators

if TYPE_CHECKING:
    from megatron.config.sections import Config


class Compilation(NamedTuple):
    """A choice for the log: whether layers are compiled, and the reason in words."""

    on: bool
    reason: str

    def __str__(self) -> str:
        return f"{'on' if self.on else 'off'}, {self.reason}"


def choose_compilation(
    config: Config, device: str, *, triton: bool | None = None, compiler: bool | None = None
) -> Compilation:
    """Choose whether to compile the layers of a run.

    `--compile` decides if given. Otherwise layers are compiled where compiled kernels break no
    promise of the run. Recomputation, pipelines and gradient paths work with compiled layers too,
    since seeding and hooks are outside the compiled code, and collectives are operators in it.

    Args:
        config: Settings of the run.
        device: Type of the device, "cpu" or "cuda".
        triton: Whether Triton is installed; None looks for it.
        compiler: Whether a C compiler is installed; None looks for it.
    """
    asked = config.training.compile
    if asked is not None:
        return Compilation(asked, f"as --compile {str(asked).lower()} asks")
    triton = find_spec("triton") is not None if triton is None else triton
    compiler = finds_compiler() if compiler is None else compiler
    if reason := _why_not(config, device, triton=triton, compiler=compiler):
        return Compilation(False, reason)
    return Compilation(True, "the default on CUDA; --compile false turns it off")


def _why_not(config: Config, device: str, *, triton: bool, compiler: bool) -> str:
    if device != "cuda":
        return "the default on a CPU, where equal runs are equal to the last bit"
    if config.parallel.tensor_model_parallel_size > 1:
        # Values that all ranks compute must round equally.
        return "the default with tensor parallelism, where each rank times and chooses its kernels"
    if runs_by_operators(config.recompute):
        granularity = config.recompute.recompute_granularity
        return f"since recompute_granularity {granularity} runs layers operator by operator"
    if config.training.deterministic_mode:
        return "since deterministic_mode is on, and the compiler chooses kernels by timing them"
    if not triton:
        return "since Triton, which compiles for CUDA, is not installed"
    if not compiler:
        return "since Triton finds no C compiler for its launchers; install gcc or set CC"
    return ""
