"""The settings of `--grad-path samo`, and the settings that exclude each other."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Literal

from megatron.config import (
    RefusedPair,
    ValueRange,
    above,
    at_least,
    below_one,
    option,
    options_of,
    refused_pair,
    section,
)
from samo.schedule import FRACTION, THRESHOLD


@section
class SamoConfig:
    """Training of a pruned network whose states are stored compressed."""

    samo_sparsity: float = option(
        default=0.9,
        help="Share of the entries of each pruned tensor that is pruned (0 = none, as dense).",
        within=below_one(),
    )
    samo_pruning: Literal["magnitude", "random", "file", "early-bird"] = option(
        default="magnitude",
        help="Entries to keep. magnitude: the largest weights, initial or loaded; random: a "
        "random draw; file: those of samo_mask_file; early-bird: the largest, once that"
        " choice stays the same during dense training.",
    )
    samo_scope: Literal["tensor", "global"] = option(
        default="tensor",
        help="Tensors among which magnitudes are compared: each separately, or all together.",
    )
    samo_mask_file: str | None = option(
        default=None,
        help="Mask file by tools/prune_checkpoint.py (none = no file is needed).",
    )
    samo_keep_embeddings: bool = option(
        default=False, help="Do not prune embeddings; biases and norms are never pruned."
    )
    samo_dense: tuple[str, ...] | None = option(
        default=None,
        help="Shell patterns of logical names of tensors that are not pruned, as *.attention.* "
        "(none = all weight matrices and embeddings are pruned).",
    )
    samo_early_bird_interval: int = option(
        default=20,
        help="Applied steps of dense training between draws of the early-bird ticket.",
        within=at_least(1),
    )
    samo_early_bird_distance: float = option(
        default=0.1,
        help="Prune when the last five masks differ by less than this, as |A xor B| / (|A| + |B|).",
        within=ValueRange(low=0, low_open=True, high=1),
    )
    dsr_interval: int | None = option(
        default=None,
        help="Applied steps between rewirings at first; the interval doubles three times in "
        "a run (none = masks stay; Sohoni et al. used 100).",
        within=at_least(1),
    )
    dsr_frequency: float = option(
        default=1.0,
        help="Number that divides all intervals between rewirings (Sohoni et al. used 0.5 at "
        "sparsity 0.9).",
        within=above(0),
    )
    dsr_growth: Literal["survivors", "zeros"] = option(
        default="survivors",
        help="Share of each tensor in the new entries of a rewiring: in proportion to the entries "
        "that survive in it, or to its zeros (Mostafa and Wang's anti_paper).",
    )
    dsr_fraction: float = option(
        default=FRACTION,
        help="Share of the entries of pruned tensors, stored or not, that a rewiring moves.",
        within=ValueRange(low=0, low_open=True, high=1, high_open=True),
    )
    dsr_threshold: float = option(
        default=THRESHOLD,
        help="Magnitude below which the first rewiring prunes; it adapts to the fraction.",
        within=above(0),
    )
    dsr_until: int | None = option(
        default=None,
        help="Last applied step that a rewiring may follow (none = after 95 % of the run).",
        within=at_least(1),
    )
    dsr_reset_moments: Literal["all", "new"] = option(
        default="all",
        help="Moments that are set to zero at a rewiring: all (Sohoni et al.), or those of "
        "new entries.",
    )

    @property
    def is_pruned_by_file(self) -> bool:
        """Whether a file alone says what is pruned.

        A rewiring prunes tensors by name, since any of them may be stored whole for a while.
        """
        return self.samo_pruning == "file" and self.dsr_interval is None

    @property
    def dense(self) -> tuple[str, ...]:
        """Patterns of `samo_dense`; empty for none."""
        return self.samo_dense or ()

    @property
    def sparsity(self) -> Fraction:
        """Value of `samo_sparsity` as an exact decimal fraction."""
        return Fraction(str(self.samo_sparsity))


def _changes(options: SamoConfig, *prefixes: str) -> bool:
    """Return whether a setting whose name begins so is not the default."""
    return any(
        getattr(options, field.name) != field.default
        for field in dataclasses.fields(options)
        if field.name.startswith(prefixes)
    )


SAMO_PAIRS: tuple[RefusedPair, ...] = (
    refused_pair(
        "settings of DSR without dsr_interval",
        lambda c: (o := options_of(c, SamoConfig)).dsr_interval is None and _changes(o, "dsr_"),
        "masks stay as they are, and nothing reads the settings",
        "give --dsr-interval, or drop them",
    ),
    refused_pair(
        "samo_early_bird_interval or samo_early_bird_distance without samo_pruning early-bird",
        lambda c: (
            (o := options_of(c, SamoConfig)).samo_pruning != "early-bird"
            and _changes(o, "samo_early_bird_")
        ),
        "no ticket is drawn",
        "give --samo-pruning early-bird, or drop them",
    ),
    refused_pair(
        "samo_pruning file without samo_mask_file",
        lambda c: (
            (o := options_of(c, SamoConfig)).samo_pruning == "file" and o.samo_mask_file is None
        ),
        "the masks have to come from somewhere",
        "give --samo-mask-file, as tools/prune_checkpoint.py writes it",
    ),
    refused_pair(
        "samo_mask_file with a samo_pruning that draws",
        lambda c: (
            (o := options_of(c, SamoConfig)).samo_pruning != "file" and o.samo_mask_file is not None
        ),
        "the masks can come from one place only",
        "give --samo-pruning file, or drop --samo-mask-file",
    ),
    refused_pair(
        "samo_keep_embeddings with samo_pruning file, without dsr_interval",
        lambda c: (o := options_of(c, SamoConfig)).is_pruned_by_file and o.samo_keep_embeddings,
        "the file decides which entries are pruned",
        "draw the masks with --keep-embeddings, or drop --samo-keep-embeddings",
    ),
    refused_pair(
        "samo_dense with samo_pruning file, without dsr_interval",
        lambda c: (o := options_of(c, SamoConfig)).is_pruned_by_file and o.samo_dense is not None,
        "the file says what is pruned",
        "draw the masks with --dense, or drop --samo-dense",
    ),
    refused_pair(
        "samo_scope global with samo_pruning file",
        lambda c: (
            (o := options_of(c, SamoConfig)).samo_pruning == "file" and o.samo_scope == "global"
        ),
        "the masks are drawn already",
        "drop --samo-scope",
    ),
    refused_pair(
        "samo_scope global with samo_pruning random",
        lambda c: (
            (o := options_of(c, SamoConfig)).samo_pruning == "random" and o.samo_scope == "global"
        ),
        "a draw compares nothing; each tensor has its share",
        "drop --samo-scope",
    ),
    refused_pair(
        "dsr_interval with grad_wire int8 or int4 and feedback",
        lambda c: options_of(c, SamoConfig).dsr_interval is not None and c.gradient.keeps_rounding,
        "what the wire rounded off may belong to entries that a rewiring prunes",
        "give --grad-wire bf16, or --grad-wire-feedback false",
    ),
    refused_pair(
        "dsr_interval with samo_pruning early-bird",
        lambda c: (
            (o := options_of(c, SamoConfig)).dsr_interval is not None
            and o.samo_pruning == "early-bird"
        ),
        "one waits for a stable mask, the other changes it",
        "give another --samo-pruning, or drop --dsr-interval",
    ),
    refused_pair(
        "dsr_interval with a radius path",
        lambda c: options_of(c, SamoConfig).dsr_interval is not None and "radius" in c.extensions,
        "what Radius has not sent yet would belong to entries that are gone",
        "give --grad-path samo, or drop --dsr-interval",
    ),
    refused_pair(
        "dsr_interval with samo_sparsity 0",
        lambda c: (
            (o := options_of(c, SamoConfig)).dsr_interval is not None and o.samo_sparsity == 0
        ),
        "no entry could grow",
        "raise --samo-sparsity, or drop --dsr-interval",
    ),
)
