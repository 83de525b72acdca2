"""From the command line and the file to one checked `Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.config import SECTIONS, SPECS, Config
from megatron.config.flags import read_flags
from megatron.config.megatron_names import MEGATRON_NAMES, SYNONYMS
from megatron.config.notices import notices
from megatron.config.options import Spec, flag_name, specs_of
from megatron.config.refused_pairs import check_pairs
from megatron.config.rules import check
from megatron.config.values import Given, Scalar, convert, nearest, show_path, show_plain
from megatron.config.yaml_file import Entry, read_entries
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.path_options import PathOptions

DEFAULT_NAME = "gpt"
"""Name of a configuration that comes from no file."""


def parse(argv: Sequence[str], *, paths: Mapping[str, PathOptions]) -> Config:
    """The configuration that flags and `--config` ask for, checked as far as is possible without
    knowing the number of ranks.

    `paths` maps the values of `--grad-path`; their options are flags too. Raises `ConfigError`,
    or SystemExit(0) after `--help` and `--help-compat`.
    """
    fields = _Fields(paths)
    path_pairs = {name: path.refused_pairs for name, path in paths.items()}
    line = read_flags(argv, fields.by_section, path_pairs)
    file = {} if line.config is None else _read_file(line.config, fields)
    givens = file | line.givens

    path, complaint = _selected_path(givens, paths)
    specs = {**SPECS, **(fields.of_path(path) if path else fields.extensions)}
    values, complaints = _convert_all(givens, specs, path, fields)
    complaints = [*line.complaints, *([complaint] if complaint else []), *complaints]
    if path is None or complaints:
        raise _all_at_once(complaints)
    _require(specs, values)

    name = DEFAULT_NAME if line.config is None else Path(line.config).stem
    config = _build(values, path, name)
    check(config, givens)
    check_pairs(config, path.refused_pairs)
    path.check(config)
    lines = [*line.notices, *_overrides(line.givens, file, specs), *notices(config, givens)]
    return dataclasses.replace(
        config, notices=tuple(dict.fromkeys(lines)), from_flags=frozenset(line.givens)
    )


def fields_by_section(paths: Mapping[str, PathOptions]) -> Mapping[str, Sequence[Spec]]:
    """Return every setting by section, in the order of `--help`: the fixed sections, then those
    that the gradient paths bring."""
    return _Fields(paths).by_section


class _Fields:
    """Every field there is: the fixed ones, and the options of each gradient path."""

    def __init__(self, paths: Mapping[str, PathOptions]) -> None:
        self._paths = paths
        self.takers: dict[str, list[str]] = {}
        """The paths that take an option."""
        self.extensions: dict[str, Spec] = {}
        self.homes = {spec.name: spec.section for spec in SPECS.values()}
        """The section that has a field; paths may share it."""
        for name, path in paths.items():
            for spec in self.of_path(path).values():
                assert spec.name not in SPECS, f"{spec.name}: an option of {name} and a field"
                self.extensions.setdefault(spec.name, spec)
                self.takers.setdefault(spec.name, []).append(name)
                home = self.homes.setdefault(spec.name, spec.section)
                assert home == spec.section, f"{spec.name}: in {home} and in {spec.section}"
        self.sections = {*SECTIONS, *(name for path in paths.values() for name in path.sections)}

    @staticmethod
    def of_path(path: PathOptions) -> dict[str, Spec]:
        """The options of one path."""
        found: dict[str, Spec] = {}
        for section, cls in path.sections.items():
            found |= specs_of(cls, section)
        return found

    @property
    def by_section(self) -> dict[str, list[Spec]]:
        """All fields as `--help` shows them, with the values of `--grad-path`."""
        grouped: dict[str, list[Spec]] = {}
        for spec in (*SPECS.values(), *self.extensions.values()):
            if spec.name == "grad_path":
                spec = dataclasses.replace(spec, choices=tuple(self._paths))
            grouped.setdefault(spec.section, []).append(spec)
        return grouped


def _read_file(path: str, fields: _Fields) -> dict[str, Given]:
    """The file's values by field name."""
    return dict(_given(path, entry, fields) for entry in read_entries(path) if not _empty(entry))


def _empty(entry: Entry) -> bool:
    """Whether it is the head of a section with nothing in it."""
    bare = isinstance(entry.value, Scalar) and entry.value.is_null
    return bare and entry.section is None and entry.key in SECTIONS


def _given(path: str, entry: Entry, fields: _Fields) -> tuple[str, Given]:
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
    return entry.key, Given(origin=f"{where}: {key}", value=entry.value, from_file=True)


def _hint(key: str, fields: _Fields) -> str:
    """What an unknown key may have meant."""
    for name in MEGATRON_NAMES:
        if name.flag in (flag_name(key), f"--{key}"):
            return f"; as a flag it is {name.outcome}"
    return nearest(key.replace("-", "_"), (*fields.homes, *fields.sections), SYNONYMS)


def _selected_path(
    givens: Mapping[str, Given], paths: Mapping[str, PathOptions]
) -> tuple[PathOptions | None, str]:
    """The gradient path, or None and a complaint about the name that was given."""
    spec = SPECS["grad_path"]
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
    givens: Mapping[str, Given],
    specs: Mapping[str, Spec],
    path: PathOptions | None,
    fields: _Fields,
) -> tuple[dict[str, Any], list[str]]:
    """The typed values, and a complaint for each field that the gradient path does not take or
    whose value cannot be read."""
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
    """One error for all complaints, so that a script of another program is put right in one go."""
    different = list(dict.fromkeys(complaints))
    if len(different) == 1:
        return ConfigError(different[0])
    listed = " ".join(f"({number}) {text}" for number, text in enumerate(different, start=1))
    return ConfigError(f"{len(different)} settings are refused: {listed}")


def _require(specs: Mapping[str, Spec], values: Mapping[str, object]) -> None:
    missing = [spec for spec in specs.values() if spec.required and spec.name not in values]
    if missing:
        names = ", ".join(spec.name for spec in missing)
        flags = ", ".join(spec.flag for spec in missing)
        raise ConfigError(f"{names}: not given; give {flags}, or the same in a --config file")


def _build(values: Mapping[str, Any], path: PathOptions, name: str) -> Config:
    sections = {
        section: cls(**{n: values[n] for n in specs_of(cls, section) if n in values})
        for section, cls in SECTIONS.items()
    }
    extensions: dict[str, object] = {
        section: cls(**{n: values[n] for n in specs_of(cls, section) if n in values})
        for section, cls in path.sections.items()
    }
    return Config(**sections, extensions=extensions, name=name)


def _overrides(
    flags: Mapping[str, Given], file: Mapping[str, Given], specs: Mapping[str, Spec]
) -> Iterator[str]:
    """A line for each field that file and flags set differently."""
    for name in flags:
        if name not in file:
            continue
        new, old = flags[name], file[name]
        if convert(specs[name], new) != convert(specs[name], old):
            yield f"{new.origin} {_written(new)} overrides {_written(old)} of {old.origin}"


def _written(given: Given) -> str:
    """The value as the user wrote it."""
    scalars = (given.value,) if isinstance(given.value, Scalar) else given.value
    return " ".join(show_plain(scalar.text) for scalar in scalars)
