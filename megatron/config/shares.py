"""The three numbers of `--split`."""

from __future__ import annotations

import math

from megatron.errors import ConfigError

RULE = "--split wants three numbers >= 0, not all 0, for train, valid and test, as in 969,30,1"


def split_shares(text: str) -> list[float]:
    """Shares of train, valid and test, in any scale.

    Three numbers >= 0 of which one is positive, separated by commas; ConfigError otherwise
    (Megatron reads "-1,1,1" as "1,1,1" and fills "900,50" up with a zero).
    """
    try:
        shares = [float(item) for item in text.split(",")]
    except ValueError:
        raise ConfigError(f"split {text!r}: not numbers; {RULE}") from None
    if len(shares) != 3:
        raise ConfigError(f"split {text!r}: {len(shares)} numbers; {RULE}")
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise ConfigError(f"split {text!r}: {RULE}")
    return shares
