"""Facts about a machine, from the lines NAME=VALUE of its file in scripts/site."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.config.fields import nearest
from megatron.errors import ConfigError
from megatron.parallel.dims import Axis, ParallelDims

_LINE = re.compile(r"([A-Z][A-Z0-9_]*)=([A-Za-z0-9._+-]+)\s*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
GIB = 2**30
GIGA = 10**9


@dataclass(frozen=True, kw_only=True)
class Site:
    """A machine: rates in bytes, seconds and FLOP/s.

    `efficiency` is the share of a GPU's peak that forward and backward reach, or only their large
    products where `half_size`, the size at which a dimension of a product halves its rate, is not
    0 (`products.ShapeLaw`). `network_efficiency` is the share of a node's network rate that a
    collective reaches (a message reaches all of it), `host_link_rate` the rate between a GPU and
    its host, each way, and `host_memory_rate` the rate of a node's host memory, for reading and
    writing together.
    """

    name: str
    device: Literal["cpu", "cuda"]
    gpu: str
    memory: float
    memory_rate: float
    peak: float
    peak_fp32: float
    efficiency: float
    gpus_per_node: int
    link_rate: float
    link_latency: float
    nics_per_node: int
    nic_rate: float
    nic_latency: float
    network_efficiency: float
    host_link_rate: float
    host_memory: float
    host_memory_rate: float
    cuda_aware_mpi: bool
    disk_rate: float
    half_size: float = 0.0

    def link(self, dims: ParallelDims, axis: Axis) -> Link:
        """Return the link of a group's ranks along an axis, while all such groups communicate.

        Groups with ranks on the same node share its NICs.
        """
        # All groups are placed like the group of the first rank, or nearly so.
        line = range(0, dims.sizes[axis] * dims.stride(axis), dims.stride(axis))
        here = self.gpus_per_node
        on_nodes = Counter(rank // here for rank in line)
        if dims.world_size <= here or len(on_nodes) == 1:
            return Link(self.link_latency, self.link_rate)
        groups = max(here // max(on_nodes.values()), 1)
        rate = self.nics_per_node * self.nic_rate * self.network_efficiency / groups
        return Link(self.nic_latency, min(rate, self.link_rate))

    def message(self, dims: ParallelDims) -> Link:
        """Return the link of a message to the next pipeline stage while all pipelines communicate.

        It is the mean over the boundaries between stages, some within a node and others between
        nodes.
        """
        here, apart = self.gpus_per_node, dims.stride("pp")
        within = Link(self.link_latency, self.link_rate)
        if dims.world_size <= here:
            return within
        senders = [rank for line in dims.lines("pp") for rank in line[:-1]]
        crossing = sum(rank // here != (rank + apart) // here for rank in senders)
        # The last `apart` ranks of a node have their next stage on another node, and share the
        # NICs.
        rate = self.nics_per_node * self.nic_rate / min(apart, here)
        between = Link(self.nic_latency, min(rate, self.link_rate))
        return within.mixed_with(between, crossing / max(len(senders), 1))


@dataclass(frozen=True)
class Link:
    """The alpha-beta model: a message of b bytes takes `latency` + b / `rate` seconds."""

    latency: float
    rate: float

    def message(self, nbytes: float) -> float:
        """Return the seconds of a message."""
        return self.latency + nbytes / self.rate

    def mixed_with(self, other: Link, share: float) -> Link:
        """Return the mean link of messages if a share of them uses another link."""
        if share in (0, 1):
            return other if share else self
        slowness = (1 - share) / self.rate + share / other.rate
        return Link((1 - share) * self.latency + share * other.latency, 1 / slowness)

    def ring(self, sent: float, ranks: int, *, rounds: int) -> float:
        """Return the seconds of a ring collective in which each rank sends `sent` bytes.

        `rounds` is the number of trips round the ring (Eq. 3 of the Radius paper).
        """
        return rounds * (ranks - 1) * self.latency + sent / self.rate


def read_site(folder: Path, name: str, gpu: str | None = None) -> Site:
    """Return the facts of a site, with one of its kinds of GPU (None: the first).

    Raises `ConfigError` for an unknown site or kind of GPU, and for a file with bad facts.
    """
    known = sorted(file.stem for file in folder.glob("*.env"))
    if not _NAME.fullmatch(name) or name not in known:
        near = nearest(name, known)
        raise ConfigError(f"site: {name!r} is none of {', '.join(known)}{near}; give one of them")
    try:
        found = _lines((folder / f"{name}.env").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site: {folder / name}.env cannot be read ({error}); mend it") from None
    kinds = {found[key]: key[3:] for key in found if re.fullmatch(r"GPU(_[0-9]+)?", key)}
    gpu = gpu or next(iter(kinds), "")
    if gpu not in kinds:
        raise ConfigError(
            f"gpu: {gpu!r}; {name} has {', '.join(kinds) or 'none'}; give one of them"
        )
    facts = _Facts(name, found, kinds[gpu])
    device = facts.text("DEVICE")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"site {name}: DEVICE={device}: must be cpu or cuda")
    return Site(
        name=name,
        device="cpu" if device == "cpu" else "cuda",
        gpu=gpu,
        memory=facts.number("GPU_MEMORY_GIB") * GIB,
        memory_rate=facts.number("GPU_MEMORY_GBPS") * GIGA,
        peak=facts.number("GPU_PEAK_TFLOPS") * 1e12,
        peak_fp32=facts.number("GPU_PEAK_TFLOPS_FP32") * 1e12,
        efficiency=facts.number("EFFICIENCY"),
        gpus_per_node=int(facts.number("GPUS_PER_NODE")),
        link_rate=facts.number("GPU_LINK_GBPS") * GIGA,
        link_latency=facts.number("GPU_LINK_US") * 1e-6,
        nics_per_node=int(facts.number("NICS_PER_NODE")),
        nic_rate=facts.number("NIC_GBPS") * GIGA,
        nic_latency=facts.number("NIC_US") * 1e-6,
        network_efficiency=facts.number("NETWORK_EFFICIENCY"),
        host_link_rate=facts.number("HOST_LINK_GBPS") * GIGA,
        host_memory=facts.number("HOST_MEMORY_GIB") * GIB,
        host_memory_rate=facts.number("HOST_MEMORY_GBPS") * GIGA,
        cuda_aware_mpi=facts.flag("CUDA_AWARE_MPI"),
        disk_rate=facts.number("DISK_GBPS") * GIGA,
        half_size=facts.number("PRODUCT_HALF_SIZE") if "PRODUCT_HALF_SIZE" in found else 0.0,
    )


def with_efficiency(site: Site, share: float | None) -> Site:
    """Return the site with another share of peak (None: the site's).

    Raises `ConfigError` for a share outside (0, 1].
    """
    if share is None:
        return site
    if not 0 < share <= 1:
        raise ConfigError(f"efficiency: {share:g}: a share of peak, above 0 and at most 1")
    return dataclasses.replace(site, efficiency=share)


@dataclass(frozen=True)
class _Facts:
    site: str
    found: Mapping[str, str]
    suffix: str

    def text(self, key: str) -> str:
        """Return the value for this kind of GPU, else the value for all kinds."""
        for name in (f"{key}{self.suffix}", key):
            if name in self.found:
                return self.found[name]
        raise ConfigError(f"site {self.site}: has no {key}; add it to scripts/site/{self.site}.env")

    def flag(self, key: str) -> bool:
        """Return whether a setting is yes; a missing setting is no."""
        text = self.found.get(key, "no")
        if text not in ("yes", "no"):
            raise ConfigError(f"site {self.site}: {key}={text}: must be yes or no")
        return text == "yes"

    def number(self, key: str) -> float:
        text = self.text(key)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"site {self.site}: {key}={text}: must be a number above 0")
        return value


def _lines(text: str) -> dict[str, str]:
    """Return the settings in the file; its other lines are for a shell."""
    matches: Sequence[re.Match[str] | None] = [_LINE.fullmatch(line) for line in text.splitlines()]
    return {match[1]: match[2] for match in matches if match is not None}
