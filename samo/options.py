"""Options of the SAMO path and of rewiring. Loads no torch."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from megatron.config import Interval, above, at_least, below_one, option, section
from samo.schedule import FRACTION, THRESHOLD


@section
class SamoConfig:
    """Training of a pruned network whose states are stored compressed."""

    samo_sparsity: float = option(
        default=0.9,
        help="Share of the entries of each pruned tensor that do not exist (0 = none, as dense).",
        within=below_one(),
    )
    samo_pruning: Literal["magnitude", "random", "file", "early-bird"] = option(
        default="magnitude",
        help="Which entries stay: the largest weights at the start (initial or loaded), a random "
        "draw, those of samo_mask_file, or the largest once that choice holds still during dense "
        "training.",
    )
    samo_scope: Literal["tensor", "global"] = option(
        default="tensor",
        help="Over what the largest are compared: each tensor has its share, or all pruned "
        "tensors have it together.",
    )
    samo_mask_file: str | None = option(
        default=None,
        help="Masks drawn by tools/prune_checkpoint.py (none = the ticket needs no file).",
    )
    samo_keep_embeddings: bool = option(
        default=False, help="Leave the embeddings whole; biases and norms always are."
    )
    samo_early_bird_interval: int = option(
        default=20,
        help="Applied steps of dense training between draws of the early-bird ticket.",
        within=at_least(1),
    )
    samo_early_bird_distance: float = option(
        default=0.1,
        help="The ticket is drawn when the last five draws differ by less, as |A xor B| / "
        "(|A| + |B|).",
        within=Interval(low=0, low_open=True, high=1),
    )
    dsr_interval: int | None = option(
        default=None,
        help="Applied steps between rewirings at first; it doubles three times in a run (none = "
        "the masks stay; Sohoni et al. took 200 for nine tenths pruned).",
        within=at_least(1),
    )
    dsr_fraction: float = option(
        default=FRACTION,
        help="Share of the entries of the pruned tensors, stored or not, that a rewiring replaces "
        "by others.",
        within=Interval(low=0, low_open=True, high=1, high_open=True),
    )
    dsr_threshold: float = option(
        default=THRESHOLD,
        help="Magnitude below which the first rewiring prunes; it adapts to the fraction.",
        within=above(0),
    )
    dsr_until: int | None = option(
        default=None,
        help="Last applied step that may be followed by a rewiring (none = after 95 % of the run).",
        within=at_least(1),
    )
    dsr_reset_moments: Literal["all", "new"] = option(
        default="all",
        help="Which moments begin at zero after a rewiring: all (Sohoni et al.), or those of new "
        "entries.",
    )

    @property
    def sparsity(self) -> Fraction:
        """Exactly as it was written."""
        return Fraction(str(self.samo_sparsity))
