"""Parsing of the command line and the YAML file into one checked `Config`, and back.

PyYAML's own loaders turn `no` into False, `012` into 10 and `1e-4` into text, keep the last of two
equal keys and forget where a key stood. `read_entries` keeps scalars as text, with their lines,
until the type of the field is known (`fields.convert`). The command line has one flag for each
field, Megatron-LM's other names, and `--help`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import stat
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, overload

import yaml

from megatron.config.fields import (
    FieldSpec,
    GivenValue,
    Scalar,
    convert,
    flag_name,
    nearest,
    show,
    show_path,
    show_plain,
    specs_of,
)
from megatron.config.gpt import GPTConfig
from megatron.config.megatron_flags import (
    ELSEWHERE,
    MEGATRON_NAMES,
    OLD_NAMES,
    RETIRED_KEYS,
    RETIRED_VALUES,
    SYNONYMS,
    Ignored,
    OldName,
    Refused,
)
from megatron.config.rules import Alternatives, PathOptions, RefusedPair
from megatron.config.sections import Config
from megatron.config.validate import alternatives_of, check, check_pairs, notices, pairs_of
from megatron.errors import ConfigError

C = TypeVar("C", bound=Config)

SIZE_LIMIT = 1 << 20
"""Maximum size of a file, in bytes."""

EVENT_LIMIT = 20_000
"""Maximum number of keys and values; PyYAML needs seconds for a long list of empty values."""

Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, kw_only=True)
class YamlEntry:
    """A key of the file with its value; `section` is the enclosing key, None at the top."""

    key: str
    section: str | None
    line: int
    value: Value


def read_entries(path: str) -> list[YamlEntry]:
    """Return all fields of the file, in order. Raises `ConfigError` with file and line."""
    return _Reader(path, read_small_file(path, "--config wants a YAML file")).document()


def read_small_file(path: str, wanted: str) -> str:
    """Read a file's text without byte-order mark; `wanted` ends the errors for other content.

    Only a regular file of limited size is opened. Raises `ConfigError`.
    """
    try:
        facts = Path(path).stat()
        if stat.S_ISDIR(facts.st_mode):
            raise ConfigError(f"{show_path(path)}: a directory; {wanted}")
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{show_path(path)}: not a regular file; {wanted}")
        if facts.st_size > SIZE_LIMIT:
            raise ConfigError(
                f"{show_path(path)}: {facts.st_size} bytes; must be at most {SIZE_LIMIT}"
            )
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{show_path(path)}: cannot read the configuration ({reason}); looked in {Path.cwd()}"
        ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{show_path(path)}: byte {error.start} is not UTF-8 text; {wanted}"
        ) from None


class _Reader:
    """Walks the events of a file: a mapping of fields and of sections, which map fields."""

    def __init__(self, path: str, text: str) -> None:
        self._path = show_path(path)
        self._text = text
        self._events = self._stream()
        self._fields: dict[str, int] = {}

    def document(self) -> list[YamlEntry]:
        """Return the entries of the only document."""
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise ConfigError(f"{self._path}: empty; give at least the required fields")
        top = next(self._events)
        if isinstance(top, yaml.ScalarEvent) and not top.value:
            raise ConfigError(f"{self._path}: empty; give at least the required fields")
        if not isinstance(top, yaml.MappingStartEvent):
            raise self._error(top, "not a mapping; write lines such as num_layers: 12")
        entries = list(self._mapping(None))
        next(self._events)
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._error(after, "a second document; a configuration is one document")
        return entries

    def _stream(self) -> Iterator[Any]:
        """Yield PyYAML's events; refuse syntax errors and features that hide values."""
        try:
            for count, event in enumerate(_events(self._text)):
                if count > EVENT_LIMIT:
                    raise self._error(event, f"more than {EVENT_LIMIT} keys and values; shorten it")
                if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                    raise self._error(event, "anchors and aliases are not read; write it out")
                if getattr(event, "tag", None):
                    raise self._error(event, f"tag {show(event.tag)} is not read; remove it")
                yield event
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            problem = " ".join((error.problem or "cannot be read").split())
            hint = "; use spaces" if r"'\t'" in problem else ""
            raise ConfigError(f"{self._path}{line}: not YAML: {problem}{hint}") from None
        except yaml.YAMLError as error:
            problem = getattr(error, "reason", "cannot be read")
            raise ConfigError(
                f"{self._path}: not YAML: {problem} at character {getattr(error, 'position', 0)}"
            ) from None
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{self._path}: not YAML: {show(str(error))}") from None

    def _mapping(self, section: str | None) -> Iterator[YamlEntry]:
        """Yield entries up to the mapping's end; at the top, a nested mapping is a section."""
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key, line = self._key(event), event.start_mark.line + 1
            self._refuse_repeat(key, line, lines)
            value = next(self._events)
            if not isinstance(value, yaml.MappingStartEvent):
                self._refuse_repeat(key, line, self._fields)
                yield YamlEntry(key=key, section=section, line=line, value=self._value(key, value))
            elif section is None:
                yield from self._mapping(key)
            else:
                raise self._error(value, f"{show_plain(key)}: a mapping; must be a value or a list")

    def _key(self, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._error(event, "a key is a list or a mapping; must be a name")
        return event.value

    def _refuse_repeat(self, key: str, line: int, lines: dict[str, int]) -> None:
        if key in lines:
            raise ConfigError(
                f"{self._path}:{line}: {show_plain(key)} is given twice, first in line "
                f"{lines[key]}; remove one"
            )
        lines[key] = line

    def _value(self, key: str, event: Any) -> Value:
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        items: list[Scalar] = []
        while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
            if not isinstance(item, yaml.ScalarEvent):
                raise self._error(item, f"{show_plain(key)}: a list holds values only")
            items.append(_scalar(item))
        return tuple(items)

    def _error(self, event: Any, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}:{event.start_mark.line + 1}: {problem}")


def _events(text: str) -> Iterator[Any]:
    return yaml.parse(text, Loader=yaml.SafeLoader)  # pyright: ignore


def _scalar(event: yaml.ScalarEvent) -> Scalar:
    return Scalar(event.value, quoted=bool(event.style))


_NEGATIVE = re.compile(r"-\.?[0-9]|-inf|-nan")
_PLAIN_NEGATIVE = re.compile(r"-[0-9]+|-[0-9]*\.[0-9]+")


@dataclass(kw_only=True)
class CommandLine:
    """The result of reading the flags.

    `givens` has the values by field name; the last use of a flag wins. `complaints` has a text for
    each flag that is unknown or refused, so that one error can list them all. `pairs` are the
    refused pairs, and `path_pairs` those of each gradient path, for `--help-compat`.
    """

    config: str | None = None
    givens: dict[str, GivenValue] = field(default_factory=dict[str, GivenValue])
    notices: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])
    pairs: Sequence[RefusedPair] = ()
    path_pairs: Mapping[str, Sequence[RefusedPair]] = field(
        default_factory=dict[str, Sequence[RefusedPair]]
    )


def read_flags(
    argv: Sequence[str],
    specs: Mapping[str, Sequence[FieldSpec]],
    pairs: Sequence[RefusedPair],
    path_pairs: Mapping[str, Sequence[RefusedPair]],
) -> CommandLine:
    """Read the flags of the fields in `specs` (by section).

    Every other flag is a complaint. Raises `ConfigError` for a flag with too few or too many
    values, SystemExit after `--help` and `--help-compat`, which prints `pairs` and `path_pairs`.
    """
    parser = _parser(tuple((section, tuple(group)) for section, group in specs.items()))
    line = CommandLine(pairs=pairs, path_pairs=path_pairs)
    texts = _attach_numbers(argv, specs)
    _, unknown = parser.parse_known_args(texts, _Namespace(line))
    fields = {spec.name: spec.flag for group in specs.values() for spec in group}
    old = [name.flag for name in OLD_NAMES if name.field in fields]
    synonyms = {other: ours for other, ours in SYNONYMS.items() if ours in fields}
    known = [*fields.values(), "--config", "--help", *old]
    line.complaints += _complaints_of_unknown(texts, unknown, known, synonyms)
    return line


def _attach_numbers(argv: Sequence[str], specs: Mapping[str, Sequence[FieldSpec]]) -> list[str]:
    """Turn `--lr -1e-3` into `--lr=-1e-3`, since argparse would take the number for a flag.

    At the start of a list the number would become the only value, so a number that argparse
    recognises stays.
    """
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
    """The namespace that hands the actions of a parser the `CommandLine` to write to."""

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
    """An action that knows its row of the tables and writes to the command line."""

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
        """Record one use of the flag."""
        raise NotImplementedError


def _given(flag: str, values: str | list[str]) -> GivenValue:
    if isinstance(values, str):
        return GivenValue(origin=flag, value=Scalar(values))
    return GivenValue(origin=flag, value=tuple(Scalar(text) for text in values))


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
        print(compatibility_text(line.pairs, line.path_pairs))
        raise SystemExit(0)


def compatibility_text(
    pairs: Sequence[RefusedPair], path_pairs: Mapping[str, Sequence[RefusedPair]]
) -> str:
    """Return the text of `--help-compat`: refused pairs, and the effect of Megatron-LM's flags."""
    lines = _pair_lines(pairs)
    for path, own in path_pairs.items():
        if own:
            lines += ["", f"Refused together with --grad-path {path}:", *_pair_lines(own)]
    names = [f"  {name.flag}: {name.outcome}" for name in MEGATRON_NAMES]
    return "\n".join(["Refused together:", *lines, "", "Other flags of Megatron-LM:", *names])


def _pair_lines(pairs: Sequence[RefusedPair]) -> list[str]:
    return [f"  {pair.name}: {pair.reason}; {pair.instead}" for pair in pairs]


@cache
def _parser(sections: tuple[tuple[str, tuple[FieldSpec, ...]], ...]) -> argparse.ArgumentParser:
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
    known = {spec.name for _, fields in sections for spec in fields}
    for name in MEGATRON_NAMES:
        # An old name of a setting that this task does not have is an unknown flag.
        if not isinstance(name, OldName) or name.field in known:
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


def _arity(spec: FieldSpec) -> dict[str, Any]:
    if spec.many:
        return {"nargs": "+"}
    return {"nargs": "?", "const": "true"} if spec.kind is bool else {}


def _metavar(spec: FieldSpec) -> str:
    if spec.choices:
        return "{" + ",".join(spec.choices) + "}"
    return {int: "N", float: "X", bool: "true|false", str: "TEXT"}[spec.kind]


def _help(spec: FieldSpec) -> str:
    if spec.required:
        default = "required"
    elif spec.many and spec.default is not None:
        default = "default: " + " ".join(map(show, spec.default))
    else:
        plain = spec.default if isinstance(spec.default, str) else show(spec.default)
        default = f"default: {plain}"
    return f"{spec.help} ({default})".lstrip()


def _complaints_of_unknown(
    texts: Sequence[str],
    unknown: Sequence[str],
    known: Sequence[str],
    synonyms: Mapping[str, str],
) -> list[str]:
    """Return a complaint for each of the `unknown`.

    These are arguments among `texts`, the command line, that argparse could not place. Texts
    directly after an unknown flag are that flag's values, and the complaint about the flag covers
    them. The name of a YAML file always gets a complaint of its own.
    """
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
            complaints.append(
                f"{show_plain(flag)}: no such flag{_flag_hint(flag, known, synonyms)}; see --help"
            )
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


def _flag_hint(flag: str, known: Sequence[str], synonyms: Mapping[str, str]) -> str:
    """Return a hint at the flag that an unknown one may have meant.

    The hint is the counterpart of another program's flag, else the closest flag, if one is close.
    Dashes and underscores count as equal. Names are compared without leading dashes, which would
    make any two short flags similar.
    """
    name = flag.lstrip("-").replace("-", "_").lower()
    if name in ELSEWHERE:
        return f"; here it is {ELSEWHERE[name]}"
    meant = {flag_name(other): flag_name(ours) for other, ours in synonyms.items()}
    meant |= {flag: flag for flag in known}
    bare = {other.lstrip("-"): ours for other, ours in meant.items()}
    return nearest(flag_name(name).lstrip("-"), (), bare)


@overload
def parse(argv: Sequence[str], *, paths: Mapping[str, PathOptions]) -> GPTConfig: ...


@overload
def parse(argv: Sequence[str], *, paths: Mapping[str, PathOptions], task: type[C]) -> C: ...


def parse(
    argv: Sequence[str], *, paths: Mapping[str, PathOptions], task: type[Config] = GPTConfig
) -> Config:
    """Return the configuration of flags and `--config`.

    It is checked as far as is possible without the number of ranks.

    Args:
        argv: The command line without the name of the program.
        paths: The values of `--grad-path`; their options are flags too.
        task: The configuration of the task, which has its sections and rules.

    Raises:
        ConfigError: A setting is unknown, cannot be read or breaks a rule.
        SystemExit: With code 0, after `--help` and `--help-compat`.
    """
    fields = _Fields(paths, task)
    path_pairs = {name: path.refused_pairs for name, path in paths.items()}
    line = read_flags(argv, fields.by_section, pairs_of(task), path_pairs)
    file, retired = ({}, []) if line.config is None else _read_file(line.config, fields)
    file = _without_retired_values(file, retired)
    flags = _without_retired_values(line.givens, retired)
    givens = file | flags

    path, complaint = _selected_path(givens, paths, task)
    specs = {**task.specs(), **(fields.of_path(path) if path else fields.extensions)}
    groups = [*alternatives_of(task), *(path.alternatives if path else ())]
    replaced = _replaced(flags, file, specs, groups)
    givens = {name: given for name, given in givens.items() if name not in replaced}
    values, complaints = _convert_all(givens, specs, path, fields)
    complaints = [*line.complaints, *([complaint] if complaint else []), *complaints]
    if path is None or complaints:
        raise _all_at_once(complaints)
    _require(specs, values)
    implied = _implied(path, values)
    values |= {name: value for preset in implied.values() for name, value in preset.items()}

    name = task.task if line.config is None else Path(line.config).stem
    config = _build(task, values, path, name)
    check(config, givens)
    check_pairs(config, path.refused_pairs)
    path.check(config)
    lines = [*line.notices, *retired, *replaced.values(), *_overrides(flags, file, specs)]
    lines += [f"{preset}: {_listed(settings)}" for preset, settings in implied.items() if settings]
    lines += notices(config, givens)
    return dataclasses.replace(
        config, notices=tuple(dict.fromkeys(lines)), from_flags=frozenset(flags)
    )


def fields_by_section(
    paths: Mapping[str, PathOptions], task: type[Config] = GPTConfig
) -> Mapping[str, Sequence[FieldSpec]]:
    """Return every setting of a task by section, in the order of `--help`.

    The fixed sections come first, then the sections of the gradient paths.
    """
    return _Fields(paths, task).by_section


class _Fields:
    """Every field of a task: the fixed ones, and the options of each gradient path."""

    def __init__(self, paths: Mapping[str, PathOptions], task: type[Config]) -> None:
        self._paths = paths
        self.fixed = task.specs()
        self.takers: dict[str, list[str]] = {}
        """The paths that take an option."""
        self.extensions: dict[str, FieldSpec] = {}
        self.homes = {spec.name: spec.section for spec in self.fixed.values()}
        """The section that has a field; paths may share it."""
        for name, path in paths.items():
            for spec in self.of_path(path).values():
                assert spec.name not in self.fixed, f"{spec.name}: an option of {name} and a field"
                self.extensions.setdefault(spec.name, spec)
                self.takers.setdefault(spec.name, []).append(name)
                home = self.homes.setdefault(spec.name, spec.section)
                assert home == spec.section, f"{spec.name}: in {home} and in {spec.section}"
        sections = task.section_types()
        self.sections = {*sections, *(name for path in paths.values() for name in path.sections)}

    @staticmethod
    def of_path(path: PathOptions) -> dict[str, FieldSpec]:
        """Return the options of one path."""
        found: dict[str, FieldSpec] = {}
        for section, cls in path.sections.items():
            found |= specs_of(cls, section)
        return found

    @property
    def by_section(self) -> dict[str, list[FieldSpec]]:
        """All fields by section, as `--help` shows them; `grad_path` has the paths as choices."""
        grouped: dict[str, list[FieldSpec]] = {}
        for spec in (*self.fixed.values(), *self.extensions.values()):
            if spec.name == "grad_path":
                spec = dataclasses.replace(spec, choices=tuple(self._paths))
            grouped.setdefault(spec.section, []).append(spec)
        return grouped


def _read_file(path: str, fields: _Fields) -> tuple[dict[str, GivenValue], list[str]]:
    """Return the file's values by field name, and a notice for each retired key that is set."""
    givens: dict[str, GivenValue] = {}
    notices: list[str] = []
    for entry in read_entries(path):
        if entry.key in RETIRED_KEYS:
            if isinstance(entry.value, Scalar) and entry.value.text != "false":
                where = f"{show_path(path)}:{entry.line}"
                notices.append(f"{where}: {entry.key} is ignored: {RETIRED_KEYS[entry.key]}")
        elif not _empty(entry, fields):
            name, given = _given_field(path, entry, fields)
            givens[name] = given
    return givens, notices


def _without_retired_values(
    givens: Mapping[str, GivenValue], notices: list[str]
) -> dict[str, GivenValue]:
    """Return settings with the values that replace retired ones; append a notice for each."""
    found = dict(givens)
    for (name, old), (new, reason) in RETIRED_VALUES.items():
        given = givens.get(name)
        if given is not None and isinstance(given.value, Scalar) and given.value.text == old:
            found[name] = dataclasses.replace(given, value=Scalar(new))
            notices.append(f"{given.origin}: {old} is read as {new}: {reason}")
    return found


def _empty(entry: YamlEntry, fields: _Fields) -> bool:
    """Return whether the entry is the head of a section without keys."""
    bare = isinstance(entry.value, Scalar) and entry.value.is_null
    return bare and entry.section is None and entry.key in fields.sections


def _given_field(path: str, entry: YamlEntry, fields: _Fields) -> tuple[str, GivenValue]:
    where, key = f"{show_path(path)}:{entry.line}", show_plain(entry.key)
    if entry.section is not None and entry.section not in fields.sections:
        section = show_plain(entry.section)
        close = nearest(entry.section, fields.sections)
        raise ConfigError(f"{where}: {section}: no such section{close}")
    if entry.section is None and entry.key in fields.sections - fields.homes.keys():
        raise ConfigError(f"{where}: {key} is a section; write its keys below it, further right")
    if entry.key not in fields.homes:
        raise ConfigError(f"{where}: {key}: no such key{_hint(entry.key, fields)}")
    if entry.section is not None and entry.section != fields.homes[entry.key]:
        raise ConfigError(
            f"{where}: {key} stands under {entry.section}; it belongs under "
            f"{fields.homes[entry.key]}"
        )
    return entry.key, GivenValue(origin=f"{where}: {key}", value=entry.value, from_file=True)


def _hint(key: str, fields: _Fields) -> str:
    """Return a hint at the key that an unknown one may have meant."""
    for name in MEGATRON_NAMES:
        if isinstance(name, OldName) and name.field not in fields.homes:
            continue
        if name.flag in (flag_name(key), f"--{key}"):
            return f"; as a flag it is {name.outcome}"
    synonyms = {other: ours for other, ours in SYNONYMS.items() if ours in fields.homes}
    return nearest(key.replace("-", "_"), (*fields.homes, *fields.sections), synonyms)


def _selected_path(
    givens: Mapping[str, GivenValue], paths: Mapping[str, PathOptions], task: type[Config]
) -> tuple[PathOptions | None, str]:
    """Return the gradient path and "", or None and a complaint about the given name."""
    spec = task.specs()["grad_path"]
    given = givens.get(spec.name)
    try:
        name = spec.default if given is None else convert(spec, given)
    except ConfigError as error:
        return None, str(error)
    if name in paths:
        return paths[name], ""
    origin = spec.name if given is None else given.origin
    return None, (
        f"{origin}: {show_plain(name)} is not known; must be one of "
        f"{', '.join(paths)}{nearest(name, paths)}"
    )


def _convert_all(
    givens: Mapping[str, GivenValue],
    specs: Mapping[str, FieldSpec],
    path: PathOptions | None,
    fields: _Fields,
) -> tuple[dict[str, Any], list[str]]:
    """Return the typed values and the complaints.

    A complaint names a field that the gradient path does not take or whose value cannot be read.
    """
    values: dict[str, Any] = {}
    complaints: list[str] = []
    for name, given in givens.items():
        if name not in specs:
            assert path is not None, "without a path the options of every path are known"
            takers = " or ".join(fields.takers[name])
            complaints.append(
                f"{given.origin}: the gradient path {path.name} does not take it; leave it out, "
                f"or give --grad-path {takers}"
            )
        elif name != "grad_path" or path is not None:
            try:
                values[name] = convert(specs[name], given)
            except ConfigError as error:
                complaints.append(str(error))
    return values, complaints


def _all_at_once(complaints: Sequence[str]) -> ConfigError:
    """Return one error for all complaints, so that a script can be corrected in one go."""
    different = list(dict.fromkeys(complaints))
    if len(different) == 1:
        return ConfigError(different[0])
    listed = " ".join(f"({number}) {text}" for number, text in enumerate(different, start=1))
    return ConfigError(f"{len(different)} settings are refused: {listed}")


def _require(specs: Mapping[str, FieldSpec], values: Mapping[str, object]) -> None:
    missing = [spec for spec in specs.values() if spec.required and spec.name not in values]
    if missing:
        names = ", ".join(spec.name for spec in missing)
        flags = ", ".join(spec.flag for spec in missing)
        raise ConfigError(f"{names}: not given; give {flags}, or the same in a --config file")


def _implied(path: PathOptions, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings that each preset among `values` implies, less those among `values`."""
    return {
        f"{name} {show_plain(values[name])}": {
            other: value
            for other, value in presets.get(values[name], {}).items()
            if other not in values
        }
        for name, presets in path.presets.items()
        if name in values
    }


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items())


def _build(task: type[Config], values: Mapping[str, Any], path: PathOptions, name: str) -> Config:
    sections = {
        section: cls(**{n: values[n] for n in specs_of(cls, section) if n in values})
        for section, cls in task.section_types().items()
    }
    extensions: dict[str, object] = {
        section: cls(**{n: values[n] for n in specs_of(cls, section) if n in values})
        for section, cls in path.sections.items()
    }
    return task(**sections, extensions=extensions, name=name)


def _replaced(
    flags: Mapping[str, GivenValue],
    file: Mapping[str, GivenValue],
    specs: Mapping[str, FieldSpec],
    groups: Sequence[Alternatives],
) -> dict[str, str]:
    """Return the names of the file's settings that a flag for an alternative replaces.

    Each has the notice that announces the replacement.
    """
    found: dict[str, str] = {}
    for group in groups:
        for way in group:
            flag = next((flags[n] for n in way if n in flags and _sets(specs[n], flags[n])), None)
            others = {name for other in group if other is not way for name in other}
            for name in sorted(others & file.keys() - flags.keys() if flag else ()):
                # `null` and unreadable values neither replace anything nor are replaced.
                if flag and _sets(specs[name], file[name]):
                    found[name] = (
                        f"{flag.origin} {_written(flag)} replaces {name} {_written(file[name])} "
                        f"of {file[name].origin}"
                    )
    return found


def _sets(spec: FieldSpec, given: GivenValue) -> bool:
    """Return whether a value can be read and is not the default."""
    try:
        return convert(spec, given) != spec.default
    except ConfigError:
        return False


def _overrides(
    flags: Mapping[str, GivenValue], file: Mapping[str, GivenValue], specs: Mapping[str, FieldSpec]
) -> Iterator[str]:
    """Yield a line for each field that file and flags set differently."""
    for name in flags:
        if name not in file:
            continue
        new, old = flags[name], file[name]
        if convert(specs[name], new) != convert(specs[name], old):
            yield f"{new.origin} {_written(new)} overrides {_written(old)} of {old.origin}"


def _written(given: GivenValue) -> str:
    """Return the value as the user wrote it."""
    scalars = (given.value,) if isinstance(given.value, Scalar) else given.value
    return " ".join(show_plain(scalar.text) for scalar in scalars)


_HEADER = "# All settings of a run{of}; --config with this file and the same flags repeats it.\n"

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS_OF_OLD_YAML = frozenset("y n yes no on off true false null".split())

_TERMINAL_WIDTH = 100
_LONGEST_VALUE = 60


def to_yaml(config: Config) -> str:
    """Return every saved setting as the text of a YAML file, by section.

    Settings of one start of the program, such as folders (`RunConfig`, `CheckpointConfig.save`),
    are left out, since they do not change the results. For a task other than GPT the first line
    names the script that trains it, which `scripts/launch.sh` then starts.
    """
    of = "" if config.task == GPTConfig.task else f" of pretrain_{config.task}.py"
    sections = (_section(name, section) for name, section in config.sections.items())
    return _HEADER.format(of=of) + "".join(sections)


def brief_settings(config: Config) -> str:
    """Return the saved settings that differ from their defaults, by section, for a terminal."""
    lines: list[str] = []
    for name, section in config.sections.items():
        changed = [
            f"{spec.name} {_shortened(_value(value))}"
            for spec in specs_of(type(section), name).values()
            if spec.saved and (value := getattr(section, spec.name)) != spec.default
        ]
        if changed:
            text = f"  {name}: {', '.join(changed)}"
            lines += textwrap.wrap(text, _TERMINAL_WIDTH, subsequent_indent="    ")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _section(name: str, section: object) -> str:
    lines = [
        f"  {spec.name}: {_value(getattr(section, spec.name))}\n"
        for spec in specs_of(type(section), name).values()
        if spec.saved
    ]
    return f"{_text(name)}:\n{''.join(lines)}" if lines else ""


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, cast('tuple[Any, ...]', value)))}]"
    if isinstance(value, float):
        return _number(value)
    return _text(value) if isinstance(value, str) else str(value)


def _number(value: float) -> str:
    """Return `repr` with a decimal point, without which older YAML reads 1e-05 as text."""
    assert math.isfinite(value)
    digits, e, exponent = repr(value).partition("e")
    return digits + ("" if "." in digits else ".0") + e + exponent


def _text(value: str) -> str:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_OLD_YAML
    if plain and Scalar(value).is_text:
        return value
    return yaml.dump(value, default_style='"', width=math.inf).strip()
