"""Checks before step 1 that all ranks were started with the same settings, code and data."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.errors import ConfigError, DataError, SparsetronError
from megatron.run_dir import environment

if TYPE_CHECKING:
    from megatron.data.batches import Readers
    from megatron.parallel.groups import Group

_CODE = ("megatron", "radius", "samo")
_NAMED = 3
"""Differing facts that an error lists; it counts the remaining ones."""


def compare_starts(config: Config, run_dir: Path, world: Group) -> None:
    """Raise `ConfigError` on every rank if settings, code or packages differ.

    Collective over `world`.
    """
    facts = {name: value for name, value in config.values().items() if name != "debug"}
    here = environment()
    facts |= {"run_dir": str(run_dir), "code": code_fingerprint(), "python": here["python"]}
    facts |= here["packages"]  # type: ignore[operator]  # a dict of versions
    compare(world, facts, ConfigError, "start every rank with the same file, flags and code")


def compare_data(readers: Readers, world: Group) -> None:
    """Raise `DataError` on every rank if one reads other data. Collective over `world`."""
    facts = dict[str, str]()
    for kind, found in vars(readers).items():
        sets = found if isinstance(found, Mapping) else {"": found}
        for name, reader in sets.items():
            here = "none" if reader is None else reader.fingerprint()
            facts[f"{kind} data {name}".strip()] = here
    compare(world, facts, DataError, "give every rank the same files")


def compare(
    world: Group, facts: Mapping[str, Any], kind: type[SparsetronError], way_out: str
) -> None:
    """Raise `kind` on every rank unless all ranks have the same facts.

    The error names a rank that differs from most ranks. Collective over `world`.
    """
    mine = json.dumps(facts, sort_keys=True, default=str)
    digests = world.all_gather_str(hashlib.sha256(mine.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    usual = Counter(digests).most_common(1)[0][0]
    odd = next(rank for rank, digest in enumerate(digests) if digest != usual)
    like = digests.index(usual)
    everyone = [json.loads(text) for text in world.all_gather_str(mine)]
    keys = sorted(everyone[odd].keys() | everyone[like].keys())
    differing = [
        f"{key}: {everyone[odd].get(key)!r} there, {everyone[like].get(key)!r} on rank {like}"
        for key in keys
        if everyone[odd].get(key) != everyone[like].get(key)
    ]
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    error = kind(
        f"rank {odd} was started differently: {'; '.join(differing[:_NAMED])}{more}; {way_out}"
    )
    error.shared = True
    raise error


def code_fingerprint() -> str:
    """Return a digest (16 hex digits) of the Python files that training can import.

    Unlike a commit, it also tells uncommitted changes.
    """
    root = Path(__file__).resolve().parent.parent.parent
    files = list(root.glob("pretrain_*.py"))
    files += [file for top in _CODE for file in (root / top).rglob("*.py")]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
