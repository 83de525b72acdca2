"""Continue a text with the model of a run.

    python tools/generate.py RUN --prompt "Once upon a time" [--max-new-tokens 100]
        [--temperature 0.8] [--top-k 40] [--greedy] [--seed 0] [--num-samples 1]
        [--checkpoint-step N]

Reads RUN/config.yaml, the newest checkpoint that verifies, and the tokenizer named by the flags,
the run or its data. Exit code 2 for wrong usage, 3 if no tokenizer is found, 4 for a missing or
damaged checkpoint, or one whose model computes NaN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config.fields import whole_number  # noqa: E402
from megatron.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    DataError,
    SparsetronError,
)
from megatron.metrics.logger import without_controls  # noqa: E402
from tools.run_model import add_step_flag, add_tokenizer_flags, check_tokenizer_flags, find_model  # noqa: E402

if TYPE_CHECKING:
    from megatron.data.tokenizer import Tokenizer

MOST_TOKENS, MOST_SAMPLES = 1_000_000, 10_000
"""Largest values of the flags: more would run for days or fill the memory."""
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e9
"""Bounds of --temperature: logits that are divided by much less exceed fp32."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        _check(options)
        for text in _samples(options):
            print(without_controls(text) if sys.stdout.isatty() else text)
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate.py", description="Continue a text with the model of a run."
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder")
    add("--prompt", default="", help="text to continue (default: the start of a document)")
    add("--max-new-tokens", type=whole_number, default=100, help="stop after as many tokens")
    add("--temperature", type=float, default=0.8, help="divides the logits; lower is safer")
    add("--top-k", type=whole_number, default=40, help="draw among the K likeliest tokens; 0 = all")
    add("--greedy", action="store_true", help="always the likeliest token, no draws")
    add("--seed", type=whole_number, default=0, help="of the draws; sample i uses seed + i")
    add("--num-samples", type=whole_number, default=1, help="continuations to print")
    add_step_flag(parser)
    add_tokenizer_flags(parser)
    given = sys.argv[1:] if arguments is None else [*arguments]
    if any(flag == "--prompt" and text[:1] == "-" for flag, text in pairwise(given)):
        parser.error("--prompt: a text that begins with - is given in one word, as --prompt=-x")
    return parser.parse_args(given)


def _check(options: argparse.Namespace) -> None:
    rules = (
        _within("--max-new-tokens", options.max_new_tokens, MOST_TOKENS),
        (
            "--temperature",
            options.temperature,
            LEAST_TEMPERATURE <= options.temperature <= MOST_TEMPERATURE,
            f"from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}",
        ),
        ("--top-k", options.top_k, options.top_k >= 0, "at least 0 (0 = all tokens)"),
        _within("--num-samples", options.num_samples, MOST_SAMPLES),
        ("--seed", options.seed, 0 <= options.seed < 2**62, "from 0 to 2^62"),
    )
    for flag, value, good, rule in rules:
        if not good:
            raise ConfigError(f"{flag}: {value}; must be {rule}")
    check_tokenizer_flags(options)


def _within(flag: str, value: int, most: int) -> tuple[str, int, bool, str]:
    return flag, value, 1 <= value <= most, f"from 1 to {most}"


def _samples(options: argparse.Namespace) -> list[str]:
    """Return one text for each sample: the prompt and its continuation."""
    saved = find_model(options.run, step=options.checkpoint_step)
    tokenizer = saved.tokenizer(options)

    import torch

    from megatron.model.generation import Sampling, generate

    model = saved.load()
    prompt = tokenizer.encode(options.prompt) or [tokenizer.eod]
    if max(prompt) >= model.vocab_size:
        raise DataError(
            f"prompt: token {max(prompt)}, but the model knows {model.vocab_size}; the tokenizer "
            "is not the one it was trained with"
        )
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, greedy=options.greedy)
    texts = []
    for number in range(options.num_samples):
        tokens = generate(
            model,
            prompt,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            generator=torch.Generator().manual_seed(options.seed + number),
            end_token=tokenizer.eod,
            vocab_size=tokenizer.vocab_size,
        )
        try:
            found = list(tokens)
        except CheckpointError as error:
            raise CheckpointError(f"{saved.step}: {error}") from None
        texts.append(options.prompt + continuation(tokenizer, prompt, found))
    return texts


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that `tokens` add to the text of `prompt`.

    A decoder may drop the blank before the first word, so that `tokens` are not decoded alone,
    unless their addition changes the text before them.
    """
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
