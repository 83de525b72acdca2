"""Continue a text with the model of a run.

    python tools/generate.py RUN --prompt "Once upon a time" [--max-new-tokens 100]
        [--temperature 0.8] [--top-k 40] [--greedy] [--seed 0] [--num-samples 1]
        [--checkpoint-step N]

Reads RUN/config.yaml, the newest checkpoint that verifies, and the tokenizer that the flags or the
run name or that its data describes. Exit code 2 for wrong usage, 3 where no tokenizer can be had,
4 for a missing or damaged checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config import Config, parse  # noqa: E402
from megatron.data.tokenizer import TOKENIZER_TYPES  # noqa: E402
from megatron.errors import CheckpointError, ConfigError, DataError, SparsetronError  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402

if TYPE_CHECKING:
    import torch

    from megatron.data.tokenizer import Tokenizer
    from megatron.model.gpt import GPT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    options = _arguments(arguments)
    try:
        _check(options)
        for text in _samples(options):
            print(text)
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
    add("--max-new-tokens", type=int, default=100, help="stop after as many tokens")
    add("--temperature", type=float, default=0.8, help="divides the logits; lower is safer")
    add("--top-k", type=int, default=40, help="draw among the K likeliest tokens; 0 = all")
    add("--greedy", action="store_true", help="always the likeliest token, no draws")
    add("--seed", type=int, default=0, help="of the draws; sample i uses seed + i")
    add("--num-samples", type=int, default=1, help="continuations to print")
    add("--checkpoint-step", type=int, default=None, help="step to load (default: the newest)")
    named = parser.add_argument_group("tokenizer, where neither the run nor its data names it")
    add = named.add_argument
    add(
        "--tokenizer-type", choices=TOKENIZER_TYPES, metavar="TYPE", help=", ".join(TOKENIZER_TYPES)
    )
    add("--tokenizer-model", metavar="PATH", help="file or name of its model")
    add("--vocab-file", metavar="PATH", help="of GPT2BPETokenizer")
    add("--merge-file", metavar="PATH", help="of GPT2BPETokenizer")
    return parser.parse_args(arguments)


def _check(options: argparse.Namespace) -> None:
    rules = (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens >= 1, "at least 1"),
        ("--temperature", options.temperature, 0 < options.temperature < 1e9, "more than 0"),
        ("--top-k", options.top_k, options.top_k >= 0, "at least 0 (0 = all tokens)"),
        ("--num-samples", options.num_samples, options.num_samples >= 1, "at least 1"),
        ("--seed", options.seed, 0 <= options.seed < 2**62, "from 0 to 2^62"),
    )
    for flag, value, good, rule in rules:
        if not good:
            raise ConfigError(f"{flag}: {value}; must be {rule}")
    if options.tokenizer_type is None:
        for name in ("tokenizer_model", "vocab_file", "merge_file"):
            if getattr(options, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: given without --tokenizer-type; give both")
    if not (options.run / "config.yaml").is_file():
        raise ConfigError(f"{options.run}: no config.yaml there; give the folder of a run")


def _samples(options: argparse.Namespace) -> list[str]:
    """The prompt with each of its continuations."""
    config = parse(["--config", str(options.run / "config.yaml")], paths=GRADIENT_PATHS)
    tokenizer = _tokenizer(config, options)

    import torch

    from megatron.model.generation import Sampling, generate

    model = _load_model(config, options.run, options.checkpoint_step)
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
        )
        texts.append(options.prompt + tokenizer.decode(list(tokens)))
    return texts


def _tokenizer(config: Config, options: argparse.Namespace) -> Tokenizer:
    """The one the flags name, else the run, else the one that made its data."""
    from megatron.data.sidecar import read_sidecar
    from megatron.data.tokenizer import build_tokenizer, tokenizer_from_sidecar
    from megatron.data.vocabulary import data_prefixes

    data = config.data if options.tokenizer_type is None else options
    if data.tokenizer_type is not None:
        return build_tokenizer(
            data.tokenizer_type,
            vocab_file=data.vocab_file,
            merge_file=data.merge_file,
            model=data.tokenizer_model,
            vocab_size=config.data.vocab_size,
        )
    prefixes = data_prefixes(config.data)
    for prefix in prefixes:
        if (described := read_sidecar(prefix)) is not None:
            return tokenizer_from_sidecar(described, folder=Path(prefix).parent)
    where = "mock data has none"
    if prefixes:
        where = f"no {prefixes[0]}.json"
        where += "" if Path(prefixes[0]).is_absolute() else f" (looked from {Path.cwd()})"
    raise DataError(
        f"tokenizer: not named by the run, and {where}; give --tokenizer-type and its files"
    )


def _load_model(config: Config, run: Path, step: int | None) -> GPT:
    """The whole model in evaluation mode, with the weights of a checkpoint."""
    import torch

    from megatron.checkpoint.locate import find_checkpoint
    from megatron.checkpoint.store import Checkpoint
    from megatron.model.gpt import GPT

    found = find_checkpoint(run, step=step, say=lambda text: print(text, file=sys.stderr))
    if found is None:
        raise CheckpointError(f"{run}: no checkpoint was committed there; train it first")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Checkpoint.open(found, verify=False) as saved:
        table = "param/embedding.word_embeddings.weight"
        model = GPT(
            config.model,
            vocab_size=saved.shape(table)[0],
            seed=config.training.seed,
            dtype=_dtype(config, device),
            device=device,
        )
        values = {}
        for info in model.parameter_infos():
            name = f"param/{info.name}"
            if saved.shape(name) != tuple(info.logical_shape):
                raise CheckpointError(
                    f"{found}: {name}: shape {saved.shape(name)}, config.yaml says "
                    f"{info.logical_shape}; the two are not of one run"
                )
            values[info.name] = saved.read(name)
    model.load_values(values)
    return model.eval()


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    """The dtype of training, but fp32 for fp16 on a CPU, which multiplies that at a crawl."""
    import torch

    name = config.precision.param_dtype
    return torch.float32 if name == "float16" and device.type == "cpu" else getattr(torch, name)


if __name__ == "__main__":
    sys.exit(main())
