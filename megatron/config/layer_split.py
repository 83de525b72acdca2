"""Which layers each pipeline stage holds."""

from __future__ import annotations

from megatron.errors import ConfigError


def split_layers(
    layers: int,
    stages: int,
    *,
    first: int | None = None,
    last: int | None = None,
    per_virtual_stage: int | None = None,
) -> list[list[range]]:
    """For each stage its runs of layers, ascending; all but an interleaved schedule have one.

    Even shares, the first stages one layer more where they do not come out even; none is ever
    dropped. `first`, `last`: layers of the first and of the last stage, which hold embedding and
    output layer besides. `per_virtual_stage`: runs of so many layers, dealt out to the stages in
    turn, as often as it takes (interleaved 1F1B). Raises `ConfigError`.
    """
    if per_virtual_stage is not None:
        return _in_turns(layers, stages, per_virtual_stage)
    given = {stage: count for stage, count in ((0, first), (stages - 1, last)) if count is not None}
    rest = layers - sum(given.values())
    free = [stage for stage in range(stages) if stage not in given]
    if rest and not free:
        raise ConfigError(
            f"decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers make "
            f"{layers - rest} layers, num_layers is {layers}; they must agree"
        )
    if rest < len(free):
        raise ConfigError(
            f"pipeline_model_parallel_size {stages} leaves a stage without layers: num_layers "
            f"{layers}{_fixed(given)}; lower {'that or what the ends hold' if given else 'it'}"
        )
    counts = dict(given)
    for number, stage in enumerate(free):
        counts[stage] = rest // len(free) + (number < rest % len(free))
    starts = [sum(counts[before] for before in range(stage)) for stage in range(stages)]
    return [[range(start, start + counts[stage])] for stage, start in enumerate(starts)]


def _in_turns(layers: int, stages: int, size: int) -> list[list[range]]:
    if layers % (stages * size):
        fitting = [n for n in range(1, layers // stages + 1) if layers % (stages * n) == 0]
        way_out = f"give one of {', '.join(map(str, fitting))}" if fitting else "leave it out"
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage {size}: num_layers {layers} is not a multiple "
            f"of {size} x pipeline_model_parallel_size {stages}; {way_out}"
        )
    runs = [range(start, start + size) for start in range(0, layers, size)]
    return [runs[stage::stages] for stage in range(stages)]


def _fixed(given: dict[int, int]) -> str:
    if not given:
        return ""
    return f", of which {' and '.join(map(str, given.values()))} are given to the ends"


def describe_split(split: list[list[range]]) -> str:
    """For the log: "0-7, 8-15, 16-22, 23-29"; runs of one stage joined by +."""
    return ", ".join(
        "+".join(f"{run.start}-{run.stop - 1}" if len(run) > 1 else str(run.start) for run in runs)
        for runs in split
    )
