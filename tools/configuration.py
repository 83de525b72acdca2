"""Write docs/configuration.md: every setting of a run, from the tables that the program reads.

    python tools/configuration.py             print the page
    python tools/configuration.py --write     write docs/configuration.md
    python tools/configuration.py --check     exit code 1 if docs/configuration.md differs

The page keeps its hand-written beginning, down to the line MARK. The rest comes from
megatron/config and the gradient paths, as in `pretrain_gpt.py --help` and `--help-compat`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config import Config, GPTConfig, RefusedPair, fields_by_section, pairs_of  # noqa: E402
from megatron.config.fields import FieldSpec, flag_name  # noqa: E402
from megatron.config.gpt import SECTIONS  # noqa: E402
from megatron.config.megatron_flags import ELSEWHERE, IGNORED, OLD_NAMES, REFUSED, SYNONYMS  # noqa: E402
from megatron.tasks.translation_config import TranslationConfig  # noqa: E402
from megatron.tasks.vision_config import VisionConfig  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402

PAGE = REPO / "docs" / "configuration.md"
MARK = "<!-- Everything below this line is written by tools/configuration.py. -->\n"
TASKS: tuple[type[Config], ...] = (GPTConfig, VisionConfig, TranslationConfig)
"""Configurations of the tasks.

The page has all sections of the first, and the sections `model` and `data` of the others.
"""
FIELDS = fields_by_section(GRADIENT_PATHS)
_CODE = re.compile(r"(?<![\w/-])(--[a-z][\w-]*\w|\w+/\w+\.(?:py|yaml)|\w+_\w*|_\w+)(?![\w/-])")
"""Flags, files and names with an underscore, in a sentence."""
_KINDS = {int: "integer", float: "number", bool: "`true`, `false`", str: "text"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="configuration.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--write", action="store_true", help="write the page")
    chosen.add_argument("--check", action="store_true", help="compare the page")
    options = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if options.check and old != new:
        print(f"{PAGE.relative_to(REPO)} is out of date; run this tool with --write")
    elif options.write:
        PAGE.write_text(new, encoding="utf-8")
    elif not options.check:
        print(new, end="")
    return int(options.check and old != new)


def page(old: str) -> str:
    """Return the page with the beginning of `old` and a new generated part."""
    introduction, mark, _ = old.partition(MARK)
    assert mark, f"{PAGE.name} has lost its line {MARK!r}"
    parts = (introduction + mark, flags(), pairs(), megatron_flags(), other_programs())
    return "\n".join(parts)


def flags() -> str:
    """Return one table of flags per section of GPT, and of `model` and `data` of other tasks."""
    parts = ["## Flags\n"]
    for section, specs in FIELDS.items():
        parts.append(f"### {section}\n")
        paths = [name for name, path in GRADIENT_PATHS.items() if section in path.sections]
        if section not in SECTIONS:
            parts.append(f"Accepted with `--grad-path` {_either(map(code, paths))} alone.\n")
        parts += _flags_of(specs)
    for task in TASKS[1:]:
        for section in ("model", "data"):
            parts.append(f"### {section} of pretrain_{task.task}.py\n")
            parts += _flags_of([spec for spec in task.specs().values() if spec.section == section])
    return "\n".join(parts)


def _flags_of(specs: Sequence[FieldSpec]) -> list[str]:
    rows = [
        (code(spec.flag), code(spec.name), values(spec), default(spec), text(spec.help))
        for spec in specs
    ]
    parts = [table(("flag", "YAML key", "values", "default", "meaning"), rows)]
    if unsaved := [code(spec.flag) for spec in specs if not spec.saved]:
        parts.append(f"Not written to `config.yaml`: {', '.join(unsaved)}.\n")
    return parts


def pairs() -> str:
    """Return the tables of settings that exclude each other."""
    header = ("settings", "reason", "instead")
    by_pair: dict[RefusedPair, list[str]] = {}
    for name, path in GRADIENT_PATHS.items():
        for pair in path.refused_pairs:
            by_pair.setdefault(pair, []).append(name)
    own = [(*_pair(pair), ", ".join(map(code, names))) for pair, names in by_pair.items()]
    tasks: list[str] = []
    for task in TASKS[1:]:
        if task.refused_pairs:
            tasks.append(f"`pretrain_{task.task}.py` refuses, instead of what is GPT's own:\n")
            tasks.append(table(header, map(_pair, task.refused_pairs)))
    return "\n".join(
        [
            "## Settings that exclude each other\n",
            table(header, map(_pair, pairs_of(TASKS[0]))),
            *tasks,
            "Some gradient paths refuse more:\n",
            table((*header, "`--grad-path`"), own),
        ]
    )


def megatron_flags() -> str:
    """Return the tables of Megatron-LM's flags that are not settings here."""
    refused = [
        (code(name.flag), ", ".join(map(code, name.accepted)) or "none", text(name.reason))
        for name in REFUSED
    ]
    by_reason = _grouped((name.reason, name.flag) for name in IGNORED)
    read = [(code(old.flag), text(old.outcome.removeprefix("read as "))) for old in OLD_NAMES]
    return "\n".join(
        [
            "## Flags of Megatron-LM\n",
            "These flags of Megatron-LM are no settings of their own. The program reads them as "
            "another flag or\nignores them, which the log announces, or refuses them.\n",
            "### Read as another flag\n",
            table(("flag", "read as"), read),
            "### Ignored\n",
            table(
                ("flags", "reason"),
                [(", ".join(map(code, names)), text(why)) for why, names in by_reason.items()],
            ),
            "### Refused\n",
            "An accepted value changes nothing, and the log says so; any other value, or none, "
            "stops the start.\n",
            table(("flag", "accepted values", "reason"), refused),
        ]
    )


def other_programs() -> str:
    """Return the tables of other programs' names that an error message translates."""
    by_field = _grouped((flag_name(field), name) for name, field in SYNONYMS.items())
    return "\n".join(
        [
            "## Names of other programs\n",
            "These names of nanoGPT, litgpt, Hugging Face and other programs are refused, as flags "
            "and as YAML\nkeys; the error names the setting on the right.\n",
            table(
                ("name", "here"),
                [(", ".join(map(code, names)), code(flag)) for flag, names in by_field.items()],
            ),
            "As flags alone:\n",
            table(("name", "here"), [(code(name), text(here)) for name, here in ELSEWHERE.items()]),
        ]
    )


def values(spec: FieldSpec) -> str:
    """Return the values that a setting accepts."""
    words = ", ".join(map(code, spec.choices)) or _KINDS[spec.kind]
    if spec.within is not None:
        words += f", {spec.within}"
    if spec.many:
        words = f"{spec.count or 'one or more'} values: {words}"
    return f"{words}; `none`" if spec.optional else words


def default(spec: FieldSpec) -> str:
    """Return the default as written on the command line."""
    if spec.required:
        return "required"
    items = spec.default if spec.many and spec.default is not None else (spec.default,)
    words = {"None": "none", "True": "true", "False": "false"}
    return code(" ".join(words.get(str(item), str(item)) for item in items))


def text(sentence: str) -> str:
    """Return a sentence as Markdown: characters of tables escaped, flags and names as code."""
    return _CODE.sub(r"`\1`", re.sub(r"([|*<])", r"\\\1", sentence))


def code(word: str) -> str:
    """Return a word as Markdown's code."""
    return f"`{word}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    return "".join([lines[0], "|---" * len(header) + "|\n", *lines[1:]])


def _pair(pair: RefusedPair) -> tuple[str, str, str]:
    return text(pair.name), text(pair.reason), text(pair.instead)


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)


def _grouped(items: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
