"""The declared settings of the combination study: figures and tables of Sohoni et al. 2019.

A setting is a model with its size, the share of nonzeros, the bits of a value, the microbatch and
the checkpointing strategy. The flags of the entry scripts follow from it, and the paper's and the
planned memory follow from the flags. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron.config import Config, parse, resolve
from megatron.low_memory.strategies import Strategy
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from pretrain_translation import TRANSLATION_TASK
from pretrain_vision import VISION_TASK
from tools.planner.paper_accounting import NONE, STAR_2, TABLE_3, TABLE_4, Bits, PaperRow

REPO = Path(__file__).resolve().parents[3]
ModelName = Literal["wrn", "dc", "gpt", "small"]
Size = tuple[int, float]
"""Layers and width; of a DC-Transformer the decoder's layers and the embedding."""


def _table(name: str) -> dict[str, Any]:
    return yaml.safe_load((REPO / "configs" / "tables" / f"{name}.yaml").read_text("utf-8"))


WRN, DC = _table("wrn28_2_cifar10"), _table("dc_transformer_de_en")
BATCH = 50
"""Images of a step of the network that is trained."""
NONZEROS = (100, 50, 40, 30, 20, 10, 5)
MICROBATCHES = (100, 10, 4, 2)
RESIDUAL_1 = Strategy("residual", 1)


@dataclass(frozen=True, kw_only=True)
class StudiedModel:
    """A model of the study.

    Attributes:
        title: The name on the page.
        task: The task of its entry script.
        config: The file of `configs/` with its settings.
        size: The size of the whole network, of which others are shallower or narrower.
        dense: Shell patterns of the tensors that stay dense in a sparse network.
        unit: What a microbatch counts.
        sixteen: The 16-bit format of its values.
        two_moments: Whether the optimizer has a second moment.
        more: Flags of every setting.
    """

    title: str
    task: Any
    config: str
    size: Size
    dense: Sequence[str]
    unit: Literal["images", "tokens", "sequences"]
    sixteen: Literal["fp16", "bf16"] = "fp16"
    two_moments: bool = True
    more: Sequence[str] = ()

    def size_flags(self, size: Size) -> list[str]:
        """Return the flags of a size."""
        layers, width = size
        if self.unit == "images":
            return ["--num-layers", str(layers), "--width-factor", f"{width:g}"]
        if self.unit == "tokens":
            kernels = [str(each) for each in KERNELS[:layers]]
            flags = ["--decoder-layers", str(layers), "--decoder-kernel-size-list", *kernels]
            return [*flags, "--embed-dim", f"{width:g}"]
        heads = str(round(width) // GPT_HEAD)
        flags = ["--num-layers", str(layers), "--hidden-size", f"{width:g}"]
        return [*flags, "--num-attention-heads", heads]

    def microbatch_flags(self, microbatch: int) -> list[str]:
        """Return the flags of a microbatch; the global batch is the configuration's."""
        flag = "--microbatch-tokens" if self.unit == "tokens" else "--micro-batch-size"
        return [flag, str(microbatch)]

    def strategy_flags(self, strategy: Strategy) -> list[str]:
        """Return the flags of a checkpointing strategy."""
        if strategy == NONE:
            return []
        if self.unit == "images":
            found = ["--recompute-granularity", strategy.name]
            return [*found, "--recompute-num-layers", str(strategy.m)]
        found = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        return [*found, "--recompute-num-layers", str(strategy.m)]


KERNELS = (3, 7, 15, 31, 31, 31)
"""Kernels of the decoder of a DC-Transformer; a shallower one has the first."""
GPT_HEAD = 64
"""Width of an attention head of GPT-2."""
MODELS: Mapping[ModelName, StudiedModel] = {
    "wrn": StudiedModel(
        title="WRN",
        task=VISION_TASK,
        config="wrn28_2_cifar10.yaml",
        size=(28, 2),
        dense=WRN["dense_tensors"],
        unit="images",
        two_moments=False,
    ),
    "dc": StudiedModel(
        title="DC-Transformer",
        task=TRANSLATION_TASK,
        config="dc_transformer_de_en.yaml",
        size=(6, 512),
        dense=DC["dense_tensors"],
        unit="tokens",
    ),
    "gpt": StudiedModel(
        title="GPT",
        task=GPT_TASK,
        config="gpt_124m.yaml",
        size=(12, 768),
        dense=(),
        unit="sequences",
        sixteen="bf16",
        more=("--vocab-size", "50257", "--attention-dropout", "0", "--hidden-dropout", "0"),
    ),
    "small": StudiedModel(
        title="WRN-16-1",
        task=VISION_TASK,
        config="wrn28_2_cifar10.yaml",
        size=(16, 1),
        dense=WRN["dense_tensors"],
        unit="images",
        sixteen="bf16",
        two_moments=False,
        more=("--global-batch-size", str(BATCH)),
    ),
}
"""`small` is the network that the study trains, in bf16, which CPUs compute."""


@dataclass(frozen=True, kw_only=True)
class MemorySetting:
    """A declared row.

    Attributes:
        model: The model.
        size: Its layers and width.
        nonzeros: Per cent of the entries of the sparse tensors that exist.
        bits: Bits of a weight, a gradient, a moment and an activation.
        microbatch: Images, tokens or sequences of a microbatch.
        strategy: The checkpointing strategy.
    """

    model: ModelName
    size: Size
    nonzeros: int = 100
    bits: Bits = 32
    microbatch: int = 100
    strategy: Strategy = NONE

    @property
    def name(self) -> str:
        """Key of the row."""
        layers, width = self.size
        at = f"{self.model}-{layers}-{width:g}"
        return f"{at}-{self.nonzeros}-{self.bits}bit-mb{self.microbatch}-{self.strategy}"

    @property
    def nonzero(self) -> float:
        """Share of the entries of the sparse tensors that exist."""
        return self.nonzeros / 100

    @property
    def flags(self) -> list[str]:
        """The flags of the entry script: the settings of the file with this setting's."""
        model = MODELS[self.model]
        found = ["--config", str(REPO / "configs" / model.config), *model.more]
        found += model.size_flags(self.size) + model.microbatch_flags(self.microbatch)
        found += model.strategy_flags(self.strategy) + self.format_flags
        return found + self.sparse_flags

    @property
    def format_flags(self) -> list[str]:
        """The flags of the number formats of weights, moments and gradients."""
        if self.bits == 32:
            return ["--bf16", "false"]
        model = MODELS[self.model]
        sixteen, moments = model.sixteen, ("exp-avg", "exp-avg-sq")[: 1 + model.two_moments]
        formats = [text for m in moments for text in (f"--{m}-dtype", sixteen)]
        # bf16 gradients are summed in fp32 by default, fp16 gradients in fp16.
        sums = ["--grad-reduce-in-bf16"] if sixteen == "bf16" else []
        return [f"--{sixteen}", "--main-params-dtype", sixteen, *formats, *sums]

    @property
    def sparse_flags(self) -> list[str]:
        """The flags of a network that is sparse from the first step."""
        if self.nonzeros == 100:
            return []
        found = ["--grad-path", "samo", "--samo-pruning", "random"]
        found += ["--samo-sparsity", f"{1 - self.nonzero:.2f}"]
        dense = MODELS[self.model].dense
        return [*found, "--samo-dense", *dense] if dense else found

    @property
    def config(self) -> Config:
        """The configuration on one rank."""
        task = MODELS[self.model].task.config
        return resolve(parse(self.flags, paths=GRADIENT_PATHS, task=task), 1)


def wrn(size: Size = (28, 2), **more: Any) -> MemorySetting:
    """Return a setting of a WRN."""
    return MemorySetting(model="wrn", size=size, **more)


def printed(row: PaperRow, model: ModelName) -> MemorySetting:
    """Return the setting of a row that the report prints."""
    return MemorySetting(
        model=model,
        size=MODELS[model].size,
        nonzeros=round(100 * row.nonzero),
        bits=row.bits,
        microbatch=row.microbatch,
        strategy=row.strategy,
    )


def smaller(model: ModelName) -> tuple[list[Size], list[Size]]:
    """Return the shallower and the narrower sizes of a model."""
    layers, width = MODELS[model].size
    sizes = {
        "wrn": [(each["num_layers"], each["width_factor"]) for each in WRN["networks"]],
        "dc": [(each["decoder_layers"], each["embed_dim"]) for each in DC["networks"]],
        "gpt": [(9, 768), (6, 768), (3, 768), (12, 640), (12, 512), (12, 384), (12, 256)],
        "small": [(10, 1), (16, 0.875), (16, 0.75), (16, 0.625), (16, 0.5), (16, 0.25)],
    }[model]
    shallow = [size for size in sizes if size[0] < layers]
    return shallow, [size for size in sizes if size[1] < width]


def figures() -> dict[str, list[MemorySetting]]:
    """Return the declared settings by figure or table; a setting may stand in several."""
    low: dict[str, Any] = {"bits": 16, "strategy": STAR_2}
    return {
        "Fig. 3": [wrn(nonzeros=nonzeros) for nonzeros in NONZEROS],
        "Fig. 4": [wrn(microbatch=microbatch) for microbatch in MICROBATCHES],
        "Fig. 6": [wrn(nonzeros=each, bits=bits) for each, bits in product(NONZEROS, (32, 16))],
        "Fig. 7": [
            wrn(nonzeros=nonzeros, microbatch=microbatch, **low)
            for nonzeros, microbatch in product(NONZEROS, MICROBATCHES)
        ],
        "Fig. 8": list(_against_smaller("wrn", (10, 4), NONZEROS, STAR_2)),
        "Table 3": [printed(row, "wrn") for row in TABLE_3],
        "Fig. 9": [
            MemorySetting(
                model="dc",
                size=MODELS["dc"].size,
                nonzeros=nonzeros,
                bits=bits,
                microbatch=250,
                strategy=RESIDUAL_1,
            )
            for nonzeros, bits in product(NONZEROS, (32, 16))
        ],
        "Fig. 10": list(_against_smaller("dc", (250,), NONZEROS, RESIDUAL_1)),
        "Table 4": [printed(row, "dc") for row in TABLE_4],
        "GPT": [
            MemorySetting(
                model="gpt",
                size=MODELS["gpt"].size,
                nonzeros=nonzeros,
                bits=bits,
                microbatch=microbatch,
                strategy=strategy,
            )
            for nonzeros, bits, microbatch, strategy in product(
                (100, 30, 10), (32, 16), (8, 1), (NONE, RESIDUAL_1)
            )
        ],
        "GPT, smaller": list(_against_smaller("gpt", (1,), (100, 50, 30, 10), RESIDUAL_1)),
    }


def _against_smaller(
    model: ModelName, microbatches: Sequence[int], nonzeros: Sequence[int], strategy: Strategy
) -> Iterator[MemorySetting]:
    """Yield the sparse networks and, dense, the shallower and the narrower ones, in 16 bits."""
    shallow, narrow = smaller(model)
    whole = MODELS[model].size
    sizes = [(whole, each) for each in nonzeros] + [(size, 100) for size in (*shallow, *narrow)]
    for microbatch in microbatches:
        for size, share in sizes:
            yield MemorySetting(
                model=model,
                size=size,
                nonzeros=share,
                bits=16,
                microbatch=microbatch,
                strategy=strategy,
            )


def settings() -> dict[str, MemorySetting]:
    """Return all declared settings once, by name."""
    return {each.name: each for group in figures().values() for each in group}
