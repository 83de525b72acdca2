"""Wrong flags and wrong YAML keys, made from what the configuration says of each of its fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.fields import LARGEST_NUMBER, FieldSpec, specs_of
from megatron.config.gpt import SECTIONS, SPECS
from pretrain_gpt import GRADIENT_PATHS
from tests.sweep.asking import SweepCase

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
FIELDS = {
    **MODEL, "micro_batch_size": 2, "train_iters": 3, "lr": 0.001, "mock_data": "true",
    "vocab_size": 64, "dry_run": "true",
}  # fmt: skip
"""A configuration that is good, and that nothing is started with."""
BASE = tuple(f"--{name.replace('_', '-')}={value}" for name, value in FIELDS.items())
TOO_LARGE = (str(2**63), "9" * 30, "9" * 5000)
"""Integers that are too large, the last one longer than Python's limit on digits."""
WRONG_INTEGERS = ("x", "1.5", "", "nan", "0x10", "１２", "٣", "1_000", *TOO_LARGE)
WRONG_NUMBERS = (
    "x", "", "nan", "inf", "-inf", "1e999", "3.5e38", "-1e39", "１.5", "10%", "9" * 5000,
)  # fmt: skip
WRONG_BOOLEANS = ("maybe", "1", "TRUE", "ｔｒｕｅ")
WRONG_TEXTS = ("", "a\x1b[31mred", "two\nlines", "\u2028")


@dataclass(frozen=True)
class Field:
    """A field, and what must be given for it to be allowed."""

    spec: FieldSpec
    path: str | None

    @property
    def flags(self) -> tuple[str, ...]:
        return () if self.path is None else (f"--grad-path={self.path}",)

    @property
    def keys(self) -> str:
        return "" if self.path is None else f"grad_path: {self.path}\n"


def fields() -> list[Field]:
    """Every field of the configuration and of the gradient paths, once."""
    found = {name: Field(spec, None) for name, spec in SPECS.items()}
    for path, each in GRADIENT_PATHS.items():
        for section, cls in each.sections.items():
            for name, spec in specs_of(cls, section).items():
                found.setdefault(name, Field(spec, path))
    return list(found.values())


def wrong_values(spec: FieldSpec) -> Iterator[tuple[str, str]]:
    """Kind and text of values that the field cannot have."""
    if spec.name == "grad_path" or spec.choices:
        yield from (("choice", text) for text in ("no-such", "", "１", "a\nb"))
        return
    texts = {
        int: WRONG_INTEGERS, float: WRONG_NUMBERS, bool: WRONG_BOOLEANS, str: WRONG_TEXTS
    }[spec.kind]  # fmt: skip
    count = spec.count or 1
    yield from ((spec.kind.__name__, " ".join([text] * count)) for text in texts if count == 1)
    if count > 1:
        yield "count", "1"
    yield from (("range", text) for text in _out_of_range(spec) if count == 1)


def _out_of_range(spec: FieldSpec) -> Iterator[str]:
    if spec.within is None:
        return
    whole = spec.kind is int
    if spec.within.low > float("-inf"):
        low = int(spec.within.low) if whole else spec.within.low
        yield str(low if spec.within.low_open else low - 1)
        yield str(-(2**63) + 1 if whole else -1e300)
    if spec.within.high < float("inf"):
        high = int(spec.within.high) if whole else spec.within.high
        yield str(high if spec.within.high_open else high + 1)
        yield str(2**63 - 1 if whole else 1e300)


def flag_cases() -> Iterator[SweepCase]:
    """Each flag with each value that it cannot have, and misspelt."""
    every = fields()
    known = {field.spec.flag for field in every}
    for field in every:
        for kind, text in wrong_values(field.spec):
            argv = (*BASE, *field.flags, f"{field.spec.flag}={text}")
            yield _refused(f"flag: {kind}", argv, field.spec.flag)
        if len(field.spec.flag) > 9 and (typo := _misspelt(field.spec.flag)) not in known:
            yield _refused("flag: misspelt", (*BASE, *field.flags, typo, "1"), "did you mean --")
        if field.spec.kind is not bool:
            yield _refused("flag: no value", (*BASE, field.spec.flag), field.spec.flag)


def _misspelt(flag: str) -> str:
    middle = len(flag) // 2 + (flag[len(flag) // 2] == "-")
    return flag[:middle] + flag[middle + 1 :]


def _refused(kind: str, argv: Sequence[str], names: str) -> SweepCase:
    return SweepCase(kind=kind, command="pretrain_gpt", argv=tuple(argv), codes=(2,), names=names)


def largest_cases() -> Iterator[SweepCase]:
    """Each integer and number at the largest value that it can have. Whether it is refused depends
    on the field; but planning with it takes neither long nor much memory, and ends in a line."""
    for field in fields():
        spec = field.spec
        if spec.kind not in (int, float) or spec.many or spec.within is None:
            continue
        high = spec.within.high
        top = 2**63 - 1 if spec.kind is int else LARGEST_NUMBER
        text = str(top if high == float("inf") else spec.kind(high))
        flags = (*BASE, *field.flags, f"{spec.flag}={text}")
        # A plan looks at each layer, of which the most take half a minute.
        commands = ("pretrain_gpt", "plan") if spec.name != "num_layers" else ("pretrain_gpt",)
        for command in commands:
            # A step that nobody saved is an error of the checkpoint.
            codes = (0, 2) if spec.name != "ckpt_step" else (0, 4)
            yield SweepCase(kind="flag: largest", command=command, argv=flags, codes=codes)


def yaml_cases(folder: Path) -> Iterator[SweepCase]:
    """Each key of a file with what it cannot have: another kind of value, itself again, quotes."""
    good = "".join(f"{name}: {value}\n" for name, value in FIELDS.items())
    every = fields()
    known = {field.spec.name for field in every}
    number = 0
    for field in every:
        name = field.spec.name
        others = "".join(line for line in good.splitlines(True) if not line.startswith(f"{name}:"))
        for kind, text in _wrong_entries(field.spec):
            number += 1
            path = folder / f"{number}.yaml"
            path.write_text(others + field.keys + text)
            names = {"misspelt": "did you mean", "alias": "aliases are not read"}.get(kind, name)
            if kind == "mapping" and name in SECTIONS:
                names = "no such key"
            if kind == "misspelt" and (len(name) < 8 or text.split(":")[0] in known):
                continue
            yield _refused(f"yaml: {kind}", ("--config", str(path)), names)


def _wrong_entries(spec: FieldSpec) -> Iterator[tuple[str, str]]:
    name = spec.name
    if not spec.many:
        yield "list", f"{name}: [1, 2]\n"
    yield "mapping", f"{name}: {{a: 1}}\n"
    yield "twice", f"{name}: 1\n{name}: 2\n"
    yield "misspelt", f"{_misspelt(name)}: 1\n"
    yield "alias", f"{name}: &a 1\nseed: *a\n" if name != "seed" else f"{name}: *nobody\n"
    if spec.kind in (int, float) and not spec.many:
        yield "quoted", f"{name}: '1'\n"
        yield "not finite", f"{name}: .nan\n"
        yield "not finite", f"{name}: -.inf\n"
        yield "integer", f"{name}: {'9' * 5000}\n"
        yield "octal", f"{name}: 0o17\n"
    if spec.kind is bool:
        yield "bool", f"{name}: yes\n"
        yield "bool", f"{name}: 'true'\n"
    if not spec.optional and spec.kind is not str and not spec.many:
        yield "null", f"{name}: null\n"
