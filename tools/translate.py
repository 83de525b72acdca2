"""Translate with the model of a run, or score it on its held-back pairs.

    python tools/translate.py RUN < sentences
    python tools/translate.py RUN --input FILE --beam 4 --length-penalty 1
    python tools/translate.py RUN --bleu [--split test] [--limit 500] [--json]

The tool prints a translation for each line, found by beam search. `--bleu` translates
the sources of a held-back split, and prints the corpus BLEU of the lowercased translations
(Papineni et al. 2002, by sacrebleu) with its signature; a sentence of the language that --split-by
did not name can be in the training data too. `--tokenize none` is for data that was tokenized
before tools/preprocess_pairs.py read it.

RUN is a run folder, its checkpoints, one step folder of it, or the output of
tools/average_checkpoints.py; checkpoints of any grid work. Exit code 2 for wrong usage, 3 for bad
data, 4 for a missing or damaged checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.io import failing_as  # noqa: E402
from megatron.checkpoint.verify import open_to_all, read_manifest  # noqa: E402
from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config import parse  # noqa: E402
from megatron.config.fields import whole_number  # noqa: E402
from megatron.data.local_file import read_text  # noqa: E402
from megatron.data.pair_bpe import PairBPE  # noqa: E402
from megatron.data.pair_dataset import PairDataset, PairVocabulary  # noqa: E402
from megatron.data.preprocess_pairs import HELD_BACK  # noqa: E402
from megatron.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    DataError,
    SparsetronError,
    missing_extra,
)
from megatron.tasks.translation import pair_paths  # noqa: E402
from megatron.tasks.translation_config import TranslationConfig  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402
from tools.run_model import (  # noqa: E402
    CONFIG,
    PARAM,
    add_step_flag,
    check_shape,
    find_step,
    run_folder,
    weight_dtype,
)

if TYPE_CHECKING:
    from megatron.model.dc_transformer import DCTransformer

TOKENIZERS = ("13a", "none")
SPLIT, TOKENIZER = "test", "13a"
"""Defaults of --split and --tokenize."""
MOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Translator:
    """A checkpoint that verifies, the configuration of its run, and its vocabulary."""

    step: Path
    config: TranslationConfig
    vocabulary: PairVocabulary

    def load(self) -> DCTransformer:
        """Return the model in evaluation mode, on the GPU if there is one.

        Raises:
            CheckpointError: Weights do not have the shapes that the configuration gives.
        """
        import torch

        from megatron.checkpoint.store import Checkpoint
        from megatron.model.dc_transformer import DCTransformer

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = DCTransformer(
            self.config.model,
            source_size=len(self.vocabulary.source),
            target_size=len(self.vocabulary.target),
            seed=0,
            dtype=weight_dtype(self.config.precision.param_dtype, device),
            device=device,
        )
        values = {}
        with Checkpoint.open(self.step, verify=False) as saved:
            for info in model.parameter_infos():
                check_shape(saved, info.name, info.logical_shape)
                values[info.name] = saved.read(f"{PARAM}{info.name}")
        model.load_values(values)
        return model.eval()


def find_translator(place: Path, *, step: int | None, data_path: str | None) -> Translator:
    """Find the model in a run folder, its `checkpoints`, or one step folder.

    Args:
        place: The folder.
        step: The step, by default the newest that verifies.
        data_path: Prefix of the data, by default the run's.

    Raises:
        ConfigError: The folder has no configuration of a translation run.
        DataError: The vocabulary is missing, damaged or not the run's.
        CheckpointError: The checkpoint is missing, damaged or not of a translation run.
    """
    with failing_as(place, "read"):
        run = run_folder(place)
        danger = open_to_all(run) if run is not None else None
    if run is None:
        raise ConfigError(f"{place}: no {CONFIG} there; give the folder of a run")
    if danger is not None:
        raise ConfigError(f"{run}: {danger}")
    config = parse(["--config", str(run / CONFIG)], paths=GRADIENT_PATHS, task=TranslationConfig)
    if data_path is not None:
        data = dataclasses.replace(config.data, data_path=data_path)
        config = dataclasses.replace(config, data=data)
    if config.data.data_path is None:
        raise ConfigError(f"{run / CONFIG}: names no data; give --data-path")
    found = find_step(place, step=step, log=_log)
    if found is None:
        raise CheckpointError(f"{place}: no checkpoint was committed there; train it first")
    identity = read_manifest(found).state.get("identity")
    known = identity.get("data.vocabulary") if isinstance(identity, Mapping) else None
    if not isinstance(known, list):
        raise CheckpointError(
            f"{found}: state.identity: has no data.vocabulary, the BPE and dictionaries of a "
            "translation run; give a checkpoint of one"
        )
    vocabulary = PairVocabulary.load(pair_paths(config))
    if known != list(vocabulary.fingerprints()):
        raise DataError(
            f"{config.data.data_path}: not the BPE and dictionaries that {found} was trained with; "
            "give the run's own with --data-path"
        )
    return Translator(step=found, config=config, vocabulary=vocabulary)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = parse_arguments(arguments)
    try:
        _check(options)
        translator = find_translator(
            options.run, step=options.checkpoint_step, data_path=options.data_path
        )
        if options.bleu:
            _print_score(score(translator, options), as_json=options.json)
        else:
            for line in _translate_lines(translator, options):
                print(line)
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def score(translator: Translator, options: argparse.Namespace) -> dict[str, Any]:
    """Translate a held-back split, and return its BLEU with the facts on which BLEU depends.

    Raises:
        ConfigError: sacrebleu is not installed.
        DataError: The split is missing or damaged.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise missing_extra("sacrebleu", "data") from error
    paths = pair_paths(translator.config)
    split = options.split or SPLIT
    pairs = PairDataset(paths, split, translator.vocabulary)
    text = paths.text(split, paths.target_lang)
    references = read_text(text).splitlines()
    if len(references) != len(pairs):
        raise DataError(
            f"{text}: {len(references)} lines, but the split has {len(pairs)} pairs; write the "
            "data again"
        )
    count = min(options.limit or len(pairs), len(pairs))
    sources = [pairs.source(pair).tolist() for pair in range(count)]
    translations = _search(translator, sources, options)
    metric = BLEU(lowercase=True, tokenize=options.tokenize or TOKENIZER)
    found = metric.corpus_score(translations, [references[:count]])
    return {
        "checkpoint": str(translator.step),
        "split": split,
        "pairs": count,
        "bleu": float(found.score),
        "signature": str(metric.get_signature()),
        "beam": options.beam,
        "length_penalty": options.length_penalty,
    }


def _search(
    translator: Translator, sources: list[list[int]], options: argparse.Namespace
) -> list[str]:
    from megatron.model.beam_search import Beam, translate

    beam = Beam(
        size=options.beam,
        length_penalty=options.length_penalty,
        max_len_a=options.max_len_a,
        max_len_b=options.max_len_b,
    )
    found = translate(translator.load(), sources, beam, batch_size=options.batch_size)
    target = translator.vocabulary.target
    return [PairBPE.join(target.decode(best.tokens)) for best in found]


def _translate_lines(translator: Translator, options: argparse.Namespace) -> list[str]:
    """Translate the lines of the input; an empty line stays empty, and no line gives none."""
    lines = _read_lines(options.input)
    texts = [" ".join(line.split()) for line in lines]
    places = [place for place, text in enumerate(texts) if text]
    if not places:
        return texts
    symbols = translator.vocabulary.bpe().split([texts[place] for place in places])
    sources = [translator.vocabulary.source.encode(found) for found in symbols]
    translations = [""] * len(lines)
    for place, text in zip(places, _search(translator, sources, options), strict=True):
        translations[place] = text
    return translations


def _read_lines(path: Path | None) -> list[str]:
    text = _read_input() if path is None else read_text(path)
    return text.removesuffix("\n").split("\n") if text else []


def _read_input() -> str:
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"standard input:{line}: not UTF-8 (byte {error.start})") from error


def _print_score(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dict(found)))
        return
    print(f"BLEU {found['bleu']:.2f} on {found['pairs']} pairs of {found['split']}")
    print(f"checkpoint: {found['checkpoint']}")
    print(f"search: beam {found['beam']}, length penalty {found['length_penalty']:g}")
    print(f"sacrebleu: {found['signature']}")


def _check(options: argparse.Namespace) -> None:
    if options.bleu and options.input is not None:
        raise ConfigError("--input: not read with --bleu, which translates a split; drop one")
    for flag in () if options.bleu else ("split", "limit", "tokenize", "json"):
        if getattr(options, flag):
            raise ConfigError(f"--{flag}: without --bleu nothing is scored; give both or drop it")
    rules = (
        ("--beam", options.beam, 1 <= options.beam <= 1000, "from 1 to 1000"),
        ("--length-penalty", options.length_penalty, abs(options.length_penalty) < 100, "a number"),
        ("--max-len-a", options.max_len_a, 0 <= options.max_len_a < 1000, "from 0 to 1000"),
        ("--max-len-b", options.max_len_b, 1 <= options.max_len_b <= MOST, f"from 1 to {MOST}"),
        ("--batch-size", options.batch_size, 1 <= options.batch_size <= MOST, f"from 1 to {MOST}"),
        ("--limit", options.limit, options.limit is None or options.limit >= 1, "at least 1"),
    )
    for flag, value, good, rule in rules:
        if not good:
            raise ConfigError(f"{flag}: {value}; must be {rule}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags; argparse exits with code 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="translate.py",
        description="Translate with the model of a run, or score it on its held-back pairs.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run, checkpoints or step folder")
    add("--input", type=Path, metavar="FILE", help="sentences, one a line (standard input)")
    add("--bleu", action="store_true", help="translate a held-back split and print its BLEU")
    add("--split", choices=HELD_BACK, help=f"split of --bleu ({SPLIT})")
    add("--limit", type=whole_number, metavar="N", help="score the first N pairs of the split")
    add("--tokenize", choices=TOKENIZERS, help=f"sacrebleu's tokenizer ({TOKENIZER})")
    add(
        "--beam",
        type=whole_number,
        default=4,
        metavar="N",
        help="hypotheses kept at each position (4)",
    )
    add(
        "--length-penalty",
        type=float,
        default=1.0,
        metavar="P",
        help="exponent of the length in the score; larger for longer translations (1)",
    )
    add("--max-len-a", type=float, default=0.0, metavar="A", help="a translation has at most ...")
    add(
        "--max-len-b",
        type=whole_number,
        default=200,
        metavar="B",
        help="... A x source tokens + B tokens",
    )
    add(
        "--batch-size",
        type=whole_number,
        default=32,
        metavar="N",
        help="sentences searched at once (32)",
    )
    add("--data-path", metavar="PREFIX", help="prefix of the data (default: the run's)")
    add_step_flag(parser)
    add("--json", action="store_true", help="the figures of --bleu as one JSON object")
    return parser.parse_args(arguments)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
