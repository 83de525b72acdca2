"""The rows of the gradient-path benchmark by name, and the flags or the DDP settings behind them.

compute                     a step that sends nothing
dense, radius-D, topk-D,    our gradient paths at density D or rank R; `-no-overlap` after any of
powersgd-R                  them, `-rolling`, `-seeded`, `-in-place` after radius
ddp-4mb, ddp-25mb,          torch's DistributedDataParallel: plain with such buckets, with its
ddp-fp16, ddp-powersgd-R    fp16 hook, with its PowerSGD hook in one bucket
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.errors import ConfigError

COMPUTE = "compute"
DEFAULT = (
    COMPUTE,
    "dense",
    "dense-no-overlap",
    *(f"radius-{density}" for density in (0.9, 0.5, 0.4, 0.1)),
    *(f"topk-{density}" for density in (0.01, 0.1)),
    *(f"powersgd-{rank}" for rank in (4, 32)),
    "ddp-4mb",
    "ddp-25mb",
    "ddp-fp16",
    "ddp-powersgd-4",
    "ddp-powersgd-32",
)
_OURS = re.compile(
    r"(?P<path>dense|radius-(?P<density>[0-9.]+)|topk-(?P<top>[0-9.]+)|powersgd-(?P<rank>\d+))"
    r"(?P<variants>(-(rolling|seeded|in-place|no-overlap))*)"
)
_DDP = re.compile(r"ddp-(?:(?P<mb>\d+)mb|(?P<fp16>fp16)|powersgd-(?P<rank>\d+))")
_VARIANTS = {
    "rolling": ("--radius-schedule", "rolling"),
    "seeded": ("--radius-select", "seeded"),
    "in-place": ("--radius-residual", "in-place"),
    "no-overlap": ("--overlap-grad-reduce", "false"),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row. `kind`: compute, dense, radius, topk, powersgd (ours), or ddp. `density` of a
    radius or topk path, `rank` of either PowerSGD; `bucket_mb` None is DDP's own choice."""

    name: str
    kind: str
    flags: tuple[str, ...] = ()
    density: float = 1.0
    rank: int = 0
    overlap: bool = True
    bucket_mb: int | None = None
    hook: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether our engine sends its gradients."""
        return self.kind not in (COMPUTE, "ddp")


def method(name: str, *, interval: int = 4) -> Method:
    """The method of a row's name; `interval` is Radius's T. `ConfigError` where there is none."""
    if name == COMPUTE:
        return Method(name=name, kind=COMPUTE)
    if found := _OURS.fullmatch(name):
        return _ours(name, found, interval)
    if found := _DDP.fullmatch(name):
        return _ddp(name, found)
    raise ConfigError(f"--methods {name}: no such method; the default is {' '.join(DEFAULT)}")


def _ours(name: str, found: re.Match[str], interval: int) -> Method:
    kind = found["path"].partition("-")[0]
    flags = ["--grad-path", kind]
    if kind == "radius":
        flags += ["--radius-density", found["density"]]
        flags += ["--radius-start-iter", "1", "--radius-interval", str(interval)]
    elif kind == "topk":
        flags += ["--topk-density", found["top"]]
    elif kind == "powersgd":
        flags += ["--powersgd-rank", found["rank"]]
    variants = re.findall("|".join(_VARIANTS), found["variants"])
    if kind != "radius" and set(variants) - {"no-overlap"}:
        raise ConfigError(f"--methods {name}: -{variants[0]} goes with radius alone")
    for variant in variants:
        flags += _VARIANTS[variant]
    return Method(
        name=name,
        kind=kind,
        flags=tuple(flags),
        density=float(found["density"] or found["top"] or 1.0),
        rank=int(found["rank"] or 0),
        overlap="no-overlap" not in variants,
    )


def _ddp(name: str, found: re.Match[str]) -> Method:
    if found["rank"]:
        # One bucket: with several, the hook's chained collectives run in another order on each
        # rank, and gloo aborts.
        rank = int(found["rank"])
        return Method(name=name, kind="ddp", rank=rank, bucket_mb=1 << 20, hook="powersgd")
    if found["fp16"]:
        return Method(name=name, kind="ddp", hook="fp16")
    megabytes = int(found["mb"])
    return Method(name=name, kind="ddp", bucket_mb=None if megabytes == 25 else megabytes)
