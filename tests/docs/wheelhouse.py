"""Wheels for tests to install from where nothing can be downloaded.

    the environment the tests run in  --->  torch-2.13.0-py3-none-any.whl, numpy-..., ...

Each wheel has the name, dependencies and commands of an installed package, and the version that
constraints.txt gives it, so that pip has everything to decide as it would with those of a package
index; in place of the package's files stands one line that leads Python to a folder of links to
them, and to no other's. Setuptools, which builds our own, and MPICH, whose files lie outside of
Python's folders, are here whole.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

WHOLE = ("setuptools", "mpich")
OURS = "sparsetron"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def build_wheelhouse(folder: Path, *, links: Path, constraints: Path) -> None:
    """Write a wheel of every installed package into `folder`, and its links into `links`."""
    pinned = dict(
        (_canonical(name), version)
        for name, _, version in (
            line.partition("==") for line in constraints.read_text().split() if "==" in line
        )
    )
    found = {_canonical(each.name): each for each in distributions() if each.name}
    found.pop(OURS, None)
    for name, package in found.items():
        whole = name in WHOLE
        version = package.version.partition("+")[0]
        if not whole:
            version = pinned.get(name, version)
        files = dict(_files(package)) if whole else _link(package, links / name)
        _write(folder, name, version, _metadata(package, version, set(found)), files)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _link(package: Distribution, folder: Path) -> dict[str, bytes]:
    folder.mkdir(parents=True)
    for top in {file.parts[0] for file in package.files or ()}:
        # What is told of the package is in the wheel; `..` leads to its commands.
        if not top.endswith((".dist-info", ".pth")) and top not in ("..", "__pycache__"):
            (folder / top).symlink_to(Path(str(package.locate_file(top))))
    return {f"{folder.name}.pth": str(folder).encode()}


def _files(package: Distribution) -> Iterator[tuple[str, bytes]]:
    """The package's files, by their place in a wheel."""
    site = Path(sysconfig.get_path("purelib")).resolve()
    data = f"{_stem(_canonical(package.name), package.version)}.data"
    scripts, prefix = (
        Path(sysconfig.get_path("scripts")).resolve(),
        Path(sysconfig.get_path("data")).resolve(),
    )
    for file in package.files or ():
        path = Path(str(file.locate())).resolve()
        if not path.is_file() or "__pycache__" in path.parts or ".dist-info" in str(path):
            continue
        if path.is_relative_to(site):
            place = str(path.relative_to(site))
        elif path.is_relative_to(scripts):
            place = f"{data}/scripts/{path.name}"
        else:
            place = f"{data}/data/{path.relative_to(prefix)}"
        yield place, path.read_bytes()


def _metadata(package: Distribution, version: str, known: set[str]) -> dict[str, str]:
    """Files of .dist-info. Of packages that are not here none is needed here."""
    lines = ["Metadata-Version: 2.1", f"Name: {package.name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {x}" for x in package.metadata.get_all("Provides-Extra") or ()]
    for requirement in package.requires or ():
        match = _NAME.match(requirement)
        assert match is not None, requirement
        if _canonical(match[0]) in known:
            lines.append(f"Requires-Dist: {requirement}")
    wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    commands = package.read_text("entry_points.txt") or ""
    return {"METADATA": "\n".join(lines) + "\n", "WHEEL": wheel, "entry_points.txt": commands}


def _stem(name: str, version: str) -> str:
    return f"{name.replace('-', '_')}-{version}"


def _write(
    folder: Path, name: str, version: str, metadata: dict[str, str], files: dict[str, bytes]
) -> None:
    stem = _stem(name, version)
    for file, text in metadata.items():
        files[f"{stem}.dist-info/{file}"] = text.encode()
    record = f"{stem}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for place, content in files.items():
            entry = zipfile.ZipInfo(place)
            entry.external_attr = (0o100755 if "/scripts/" in place else 0o100644) << 16
            wheel.writestr(entry, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            lines.append(f"{place},sha256={digest.decode()},{len(content)}")
        wheel.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
