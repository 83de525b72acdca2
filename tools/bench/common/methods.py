"""The rows of the gradient-path benchmark by name, and the flags or the DDP settings behind them.

compute                     a step that sends nothing
dense, radius-D, topk-D,    our gradient paths at density D, rank R, T parts, K coefficients of a
powersgd-R, roundrobin-T,   chunk (the mean without its sign) or sparsity P (random masks);
demo-K, lowrank-R+sparse-D, `-no-overlap` after any of them, `-rolling`, `-seeded` after radius,
samo-P, samo-P+radius-D     `-wire-bf16`, `-wire-int8` and `-wire-int4` after dense, samo and radius
compute-bf16, dense-bf16,   with parameters and gradients of 16 bit, as samo's are; `-fp32` after
radius-D-bf16               samo leaves its numbers as those of the other rows
ddp-4mb, ddp-25mb,          torch's DistributedDataParallel: plain with such buckets, with its
ddp-fp16, ddp-powersgd-R    fp16 hook, with its PowerSGD hook in one bucket
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.data_parallel.wire_format import BLOCK, encoded_bytes
from megatron.errors import ConfigError

COMPUTE, COMPUTE_BF16 = "compute", "compute-bf16"
DEFAULT = (
    COMPUTE,
    "dense",
    "dense-no-overlap",
    *(f"radius-{density}" for density in (0.9, 0.5, 0.4, 0.1, 0.01)),
    *(f"topk-{density}" for density in (0.01, 0.1)),
    *(f"powersgd-{rank}" for rank in (4, 32)),
    "lowrank-4+sparse-0.01",
    "roundrobin-8",
    "demo-32",
    "ddp-4mb",
    "ddp-25mb",
    "ddp-fp16",
    "ddp-powersgd-4",
    "ddp-powersgd-32",
)
SAMO = (
    COMPUTE,
    "dense",
    "dense-bf16",
    "samo-0.9",
    "samo-0.9-fp32",
    "samo-0.9-no-overlap",
    "samo-0.9+radius-0.4",
    "ddp-4mb",
    "ddp-25mb",
    "ddp-fp16",
)
WIRE = (
    COMPUTE,
    "dense",
    "dense-bf16",
    "dense-wire-bf16",
    "dense-wire-int8",
    "dense-wire-int4",
    "radius-0.4",
    "radius-0.4-wire-bf16",
    "radius-0.4-bf16",
    "radius-0.4-wire-int4",
    "radius-0.1-wire-bf16",
    "topk-0.01",
    "powersgd-4",
    "lowrank-4+sparse-0.01",
    "ddp-25mb",
    "ddp-fp16",
)
SAMO_VISION = (COMPUTE, "dense", "dense-bf16", "samo-0.9", "ddp-25mb", "ddp-fp16")
_NUMBER = r"\d+(?:\.\d+)?"
_OURS = re.compile(
    rf"(?P<path>compute|dense|radius-(?P<density>{_NUMBER})|topk-(?P<top>{_NUMBER})"
    rf"|powersgd-(?P<rank>\d+)|lowrank-(?P<factors>\d+)\+sparse-(?P<entries>{_NUMBER})"
    rf"|roundrobin-(?P<parts>\d+)|demo-(?P<coefficients>\d+)"
    rf"|samo-(?P<sparsity>{_NUMBER})(\+radius-(?P<kept>{_NUMBER}))?)"
    r"(?P<variants>(-(rolling|seeded|no-overlap|wire-bf16|wire-int8|wire-int4|bf16|fp32))*)"
)
_DDP = re.compile(r"ddp-(?:(?P<mb>\d+)mb|(?P<fp16>fp16)|powersgd-(?P<rank>\d+))")
_SIXTEEN = ("--bf16", "--grad-reduce-in-bf16")
_VARIANTS = {
    "rolling": ("--radius-schedule", "rolling"),
    "seeded": ("--radius-select", "seeded"),
    "no-overlap": ("--overlap-grad-reduce", "false"),
    **{f"wire-{name}": ("--grad-wire", name) for name in ("bf16", "int8", "int4")},
    "bf16": _SIXTEEN,
    "fp32": (),
}
_GO_WITH = {
    **dict.fromkeys(("rolling", "seeded"), ("radius", "samo+radius")),
    "no-overlap": (
        *("dense", "radius", "topk", "powersgd", "lowrank+sparse", "roundrobin", "demo"),
        *("samo", "samo+radius"),
    ),
    **dict.fromkeys(
        ("wire-bf16", "wire-int8", "wire-int4"), ("dense", "radius", "samo", "samo+radius")
    ),
    "bf16": (COMPUTE, "dense", "radius"),
    "fp32": ("samo", "samo+radius"),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the benchmark.

    `kind` is compute, ddp, or the value of `--grad-path` (ours). `density` belongs to radius, topk
    and lowrank+sparse, `rank` to the latter and PowerSGD (ours or DDP's), `parts` to roundrobin,
    `coefficients` of a chunk to demo, and `sparsity` to samo's masks. `bucket_mb` None means DDP's
    default. `wire`: the value of `--grad-wire`.
    """

    name: str
    kind: str
    flags: tuple[str, ...] = ()
    density: float = 1.0
    rank: int = 0
    parts: int = 1
    coefficients: int = 0
    sparsity: Fraction = Fraction(0)
    overlap: bool = True
    bucket_mb: int | None = None
    hook: str | None = None
    wire: str | None = None

    @property
    def resamples(self) -> bool:
        """Whether some of the method's steps send everything."""
        return self.kind.endswith("radius")

    @property
    def dtype(self) -> str:
        """Dtype of the parameters and gradients, by torch's name."""
        return "bfloat16" if set(_SIXTEEN) <= set(self.flags) else "float32"

    @property
    def entry_bytes(self) -> float:
        """Bytes of an entry of a matrix's gradient that is sent."""
        if self.wire is not None:
            return encoded_bytes(self.wire, BLOCK) / BLOCK
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def compute(self) -> str:
        """The row with the same computation that sends nothing."""
        return COMPUTE_BF16 if self.dtype == "bfloat16" else COMPUTE


def method(name: str, *, interval: int = 4) -> Method:
    """Return the method of a row's name; `interval` is Radius's T.

    Raises `ConfigError` for an unknown name.
    """
    if found := _OURS.fullmatch(name):
        return _ours(name, found, interval)
    if found := _DDP.fullmatch(name):
        return _ddp(name, found)
    raise ConfigError(f"--methods {name}: no such method; the default is {' '.join(DEFAULT)}")


def with_computing(names: Sequence[str]) -> list[str]:
    """Return these rows, preceded by the rows that compute the same and send nothing."""
    return list(dict.fromkeys([COMPUTE, *(method(name).compute for name in names), *names]))


def _ours(name: str, found: re.Match[str], interval: int) -> Method:
    kind = re.sub(f"-{_NUMBER}", "", found["path"])
    variants = re.findall("|".join(_VARIANTS), found["variants"])
    for variant in variants:
        if kind not in _GO_WITH[variant]:
            others = " and ".join(_GO_WITH[variant])
            raise ConfigError(f"--methods {name}: -{variant} goes with {others} alone")
    density = found["density"] or found["kept"] or found["top"] or found["entries"]
    flags = [] if kind == COMPUTE else ["--grad-path", kind]
    if found["sparsity"]:
        flags += ["--samo-sparsity", found["sparsity"], "--samo-pruning", "random"]
        flags += [] if "fp32" in variants else _SIXTEEN
    if kind.endswith("radius"):
        flags += ["--radius-density", density]
        flags += ["--radius-start-iter", "1", "--radius-interval", str(interval)]
    elif kind == "topk":
        flags += ["--topk-density", density]
    elif kind == "powersgd":
        flags += ["--powersgd-rank", found["rank"]]
    elif kind == "lowrank+sparse":
        flags += ["--lowrank-rank", found["factors"], "--lowrank-density", density]
    elif kind == "roundrobin":
        flags += ["--roundrobin-interval", found["parts"]]
    elif kind == "demo":
        flags += ["--demo-k", found["coefficients"], "--demo-sign", "false"]
    for variant in variants:
        flags += _VARIANTS[variant]
    return Method(
        name=name,
        kind=kind,
        flags=tuple(flags),
        density=float(density or 1.0),
        rank=int(found["rank"] or found["factors"] or 0),
        parts=int(found["parts"] or 1),
        coefficients=int(found["coefficients"] or 0),
        sparsity=Fraction(found["sparsity"] or 0),
        overlap="no-overlap" not in variants,
        wire=next((v.removeprefix("wire-") for v in variants if v.startswith("wire-")), None),
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
