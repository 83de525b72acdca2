"""Token files, the order of samples, and tokenizers."""

from __future__ import annotations

from megatron.data.build import Datasets, build_datasets
from megatron.data.sampler import CollateOptions, Microbatch, MicrobatchSampler, collate

__all__ = [
    "CollateOptions",
    "Datasets",
    "Microbatch",
    "MicrobatchSampler",
    "build_datasets",
    "collate",
]
