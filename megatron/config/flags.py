"""The command line: one flag for each field, Megatron-LM's other names, and `--help`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from megatron.config.megatron_names import (
    ELSEWHERE,
    MEGATRON_NAMES,
    OLD_NAMES,
    SYNONYMS,
    Ignored,
    OldName,
    Refused,
)
from megatron.config.options import Spec, flag_name
from megatron.config.refused_pairs import REFUSED_PAIRS, RefusedPair
from megatron.config.values import Given, Scalar, nearest, show, show_plain
from megatron.errors import ConfigError

_NEGATIVE = re.compile(r"-\.?[0-9]|-inf|-nan")
_PLAIN_NEGATIVE = re.compile(r"-[0-9]+|-[0-9]*\.[0-9]+")


@dataclass(kw_only=True)
class CommandLine:
    """What the flags said. Fields appear in `givens` by name, the last use of a flag winning.
    `complaints`: one text for each flag that is unknown or refused, so that one error can list them
    all. `path_pairs`: what gradient paths refuse, by the path's name, for `--help-compat`."""

    config: str | None = None
    givens: dict[str, Given] = field(default_factory=dict[str, Given])
    notices: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])
    path_pairs: Mapping[str, Sequence[RefusedPair]] = field(
        default_factory=dict[str, Sequence[RefusedPair]]
    )


def read_flags(
    argv: Sequence[str],
    specs: Mapping[str, Sequence[Spec]],
    path_pairs: Mapping[str, Sequence[RefusedPair]],
) -> CommandLine:
    """Flags of the fields in `specs` (by section). Every other flag is a complaint. Raises
    `ConfigError` for a flag with too few or too many values, SystemExit after `--help` and
    `--help-compat`, which prints `path_pairs` as well."""
    parser = _parser(tuple((section, tuple(group)) for section, group in specs.items()))
    line = CommandLine(path_pairs=path_pairs)
    texts = _attach_numbers(argv, specs)
    _, unknown = parser.parse_known_args(texts, _Namespace(line))
    fields = (spec.flag for group in specs.values() for spec in group)
    known = [*fields, "--config", "--help", *(name.flag for name in OLD_NAMES)]
    line.complaints += _complaints_of_unknown(texts, unknown, known)
    return line


def _attach_numbers(argv: Sequence[str], specs: Mapping[str, Sequence[Spec]]) -> list[str]:
    """`--lr -1e-3` as `--lr=-1e-3`: argparse would take the number for a flag and not show it. In
    front of a list it would then be the only value, so a number that argparse knows stays."""
    lists = {spec.flag for group in specs.values() for spec in group if spec.many}
    joined: list[str] = []
    for text in argv:
        if joined and joined[-1] in lists and _PLAIN_NEGATIVE.fullmatch(text):
            joined.append(text)
        elif joined and _NEGATIVE.match(text) and re.fullmatch(r"--[^=]+", joined[-1]):
            joined[-1] += f"={text}"
        else:
            joined.append(text)
    return joined


class _Namespace(argparse.Namespace):
    """Lets every action write to one `CommandLine`."""

    def __init__(self, line: CommandLine) -> None:
        super().__init__()
        self.line = line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse says "argument --lr: expected one argument".
        message = re.sub(r"^argument ([^:]*)", lambda m: m[1].split("/")[-1], message)
        if message.endswith("expected one argument"):
            message += " (a value that begins with - is attached with =)"
        raise ConfigError(f"{' '.join(message.split())}; see --help")


class _Action(argparse.Action):
    """An action that knows what of the tables it stands for and writes to the command line."""

    def __init__(self, *, about: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.about = about

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        self.use(namespace.line, option_string or self.option_strings[0], values)

    def use(self, line: CommandLine, flag: str, values: Any) -> None:
        """Take note of one use of the flag."""
        raise NotImplementedError


def _given(flag: str, values: str | list[str]) -> Given:
    if isinstance(values, str):
        return Given(origin=flag, value=Scalar(values))
    return Given(origin=flag, value=tuple(Scalar(text) for text in values))


class _Field(_Action):
    def use(self, line: CommandLine, flag: str, values: Any) -> None:
        line.givens[self.dest] = _given(flag, values)


class _Config(_Action):
    def use(self, line: CommandLine, flag: str, values: Any) -> None:
        line.config = values


class _OldName(_Action):
    def use(self, line: CommandLine, flag: str, values: Any) -> None:
        old: OldName = self.about
        line.givens[old.field] = _given(flag, values if old.text is None else old.text)
        line.notices.append(f"{flag}: {old.outcome}")


class _Ignored(_Action):
    def use(self, line: CommandLine, flag: str, values: Any) -> None:
        line.notices.append(f"{flag}: {self.about.outcome}")


class _Refused(_Action):
    def use(self, line: CommandLine, flag: str, values: Any) -> None:
        refused: Refused = self.about
        shown = " ".join(values)
        if shown not in refused.accepted:
            accepted = f"; accepted: {', '.join(refused.accepted)}" if refused.accepted else ""
            value = f" {show_plain(shown)}" if shown else ""
            line.complaints.append(f"{flag}{value}: {refused.reason}{accepted}")
        else:
            line.notices.append(f"{flag} {shown}: changes nothing here")


class _HelpCompat(_Action):
    def use(self, line: CommandLine, flag: str, values: Any) -> None:
        print(compatibility_text(line.path_pairs))
        raise SystemExit(0)


def compatibility_text(path_pairs: Mapping[str, Sequence[RefusedPair]]) -> str:
    """The refused pairs and what becomes of Megatron-LM's other flags."""
    pairs = _pair_lines(REFUSED_PAIRS)
    for path, own in path_pairs.items():
        if own:
            pairs += ["", f"Refused together with --grad-path {path}:", *_pair_lines(own)]
    names = [f"  {name.flag}: {name.outcome}" for name in MEGATRON_NAMES]
    return "\n".join(["Refused together:", *pairs, "", "Other flags of Megatron-LM:", *names])


def _pair_lines(pairs: Sequence[RefusedPair]) -> list[str]:
    return [f"  {pair.name}: {pair.reason}; {pair.instead}" for pair in pairs]


@cache
def _parser(sections: tuple[tuple[str, tuple[Spec, ...]], ...]) -> argparse.ArgumentParser:
    parser = _Parser(
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage="%(prog)s [--config FILE] [--flag value ...]",
        description="Every setting is a flag and, under its section, a key of the YAML file "
        "(underscores for dashes). Flags win over the file; the last of equal flags counts; "
        "`none` unsets an optional value.",
        epilog="Flags of Megatron-LM that are not listed: see --help-compat.",
    )
    parser.add_argument("--config", action=_Config, metavar="FILE", help="YAML file to start from.")
    parser.add_argument(
        "--help-compat",
        action=_HelpCompat,
        nargs=0,
        help="Print settings that exclude each other and what becomes of Megatron-LM's flags.",
    )
    for section_name, fields in sections:
        group = parser.add_argument_group(section_name)
        for spec in fields:
            group.add_argument(
                spec.flag,
                action=_Field,
                dest=spec.name,
                help=_help(spec).replace("%", "%%"),
                metavar=_metavar(spec),
                **_arity(spec),
            )
    for name in MEGATRON_NAMES:
        _add_megatron_name(parser, name)
    return parser


def _add_megatron_name(parser: argparse.ArgumentParser, name: OldName | Ignored | Refused) -> None:
    options: dict[str, Any] = {"about": name, "help": argparse.SUPPRESS, "dest": name.flag}
    if isinstance(name, OldName):
        arity = {} if name.text is None else {"nargs": 0}
        parser.add_argument(name.flag, action=_OldName, **arity, **options)
    elif isinstance(name, Ignored):
        arity = {} if name.takes == 1 else {"nargs": name.takes}
        parser.add_argument(name.flag, action=_Ignored, **arity, **options)
    else:
        parser.add_argument(name.flag, action=_Refused, nargs="*", **options)


def _arity(spec: Spec) -> dict[str, Any]:
    if spec.many:
        return {"nargs": "+"}
    return {"nargs": "?", "const": "true"} if spec.kind is bool else {}


def _metavar(spec: Spec) -> str:
    if spec.choices:
        return "{" + ",".join(spec.choices) + "}"
    return {int: "N", float: "X", bool: "true|false", str: "TEXT"}[spec.kind]


def _help(spec: Spec) -> str:
    if spec.required:
        default = "required"
    elif spec.many and spec.default is not None:
        default = "default: " + " ".join(map(show, spec.default))
    else:
        plain = spec.default if isinstance(spec.default, str) else show(spec.default)
        default = f"default: {plain}"
    return f"{spec.help} ({default})".lstrip()


def _complaints_of_unknown(
    texts: Sequence[str], unknown: Sequence[str], known: Sequence[str]
) -> list[str]:
    """A complaint for each of the `unknown`, which argparse could not place among the `texts` of
    the command line. Texts directly after an unknown flag are that flag's values, and the complaint
    about the flag covers them. The name of a YAML file is never taken for such a value."""
    complaints: list[str] = []
    left = list(unknown)
    after_flag = False
    for text in texts:
        if not left or text != left[0]:
            after_flag = False
            continue
        del left[0]
        if text.startswith("-"):
            flag = text.split("=")[0]
            complaints.append(f"{show_plain(flag)}: no such flag{_hint(flag, known)}; see --help")
            after_flag = True
        elif not after_flag or _is_yaml(text):
            complaints.append(_stray(text))
    assert not left, "argparse keeps the order of what it does not place"
    return complaints


def _is_yaml(text: str) -> bool:
    return text.endswith((".yaml", ".yml"))


def _stray(text: str) -> str:
    if _is_yaml(text):
        return f"{show_plain(text)}: stands alone; give a configuration file as --config FILE"
    return f"{show_plain(text)}: stands alone; every value follows a --flag"


def _hint(flag: str, known: Sequence[str]) -> str:
    """What an unknown flag may have meant: the name that another program's flag has here, else the
    closest flag, if one is close. Dashes and underscores count as equal. Names are compared without
    the dashes in front, which make any two short flags look alike."""
    name = flag.lstrip("-").replace("-", "_").lower()
    if name in ELSEWHERE:
        return f"; here it is {ELSEWHERE[name]}"
    meant = {flag_name(other): flag_name(ours) for other, ours in SYNONYMS.items()}
    meant |= {flag: flag for flag in known}
    bare = {other.lstrip("-"): ours for other, ours in meant.items()}
    return nearest(flag_name(name).lstrip("-"), (), bare)
