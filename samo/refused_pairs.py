"""Settings that SAMO cannot run with, each with its reason and the way out. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.config import RefusedPair

if TYPE_CHECKING:
    from megatron.config import Config
    from samo.options import SamoConfig


def _pair(
    name: str, holds: Callable[[SamoConfig, Config], object], reason: str, instead: str
) -> RefusedPair:
    def both(config: Config) -> object:
        # Any: its class is declared beside these pairs.
        options: SamoConfig = config.extensions["samo"]  # type: ignore[assignment]
        return holds(options, config)

    return RefusedPair(name=name, holds=both, reason=reason, instead=instead)


SAMO_PAIRS: tuple[RefusedPair, ...] = (
    _pair(
        "samo_pruning file without samo_mask_file",
        lambda o, _: o.samo_pruning == "file" and o.samo_mask_file is None,
        "the masks have to come from somewhere",
        "give --samo-mask-file, as tools/prune_checkpoint.py writes it",
    ),
    _pair(
        "samo_mask_file with a samo_pruning that draws",
        lambda o, _: o.samo_pruning != "file" and o.samo_mask_file is not None,
        "the masks can come from one place only",
        "give --samo-pruning file, or drop --samo-mask-file",
    ),
    _pair(
        "samo_keep_embeddings with samo_pruning file",
        lambda o, _: o.samo_pruning == "file" and o.samo_keep_embeddings,
        "the file says what is pruned",
        "draw the masks with --keep-embeddings, or drop --samo-keep-embeddings",
    ),
    _pair(
        "samo_scope global with samo_pruning file",
        lambda o, _: o.samo_pruning == "file" and o.samo_scope == "global",
        "the masks are drawn already",
        "drop --samo-scope",
    ),
    _pair(
        "samo_scope global with samo_pruning random",
        lambda o, _: o.samo_pruning == "random" and o.samo_scope == "global",
        "a draw compares nothing; each tensor has its share",
        "drop --samo-scope",
    ),
    _pair(
        "dsr_interval with samo_pruning early-bird",
        lambda o, _: o.dsr_interval is not None and o.samo_pruning == "early-bird",
        "one waits for a mask that holds still, the other moves it",
        "give another --samo-pruning, or drop --dsr-interval",
    ),
    _pair(
        "dsr_interval with a radius path",
        lambda o, c: o.dsr_interval is not None and "radius" in c.extensions,
        "what Radius has not sent yet would belong to entries that are gone",
        "give --grad-path samo, or drop --dsr-interval",
    ),
    _pair(
        "dsr_interval with samo_sparsity 0",
        lambda o, _: o.dsr_interval is not None and o.samo_sparsity == 0,
        "there is no place to grow at",
        "raise --samo-sparsity, or drop --dsr-interval",
    ),
)
