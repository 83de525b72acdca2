"""The time limit that tests share."""

from __future__ import annotations

import os

SLOWNESS: float = max(1.0, float(os.environ.get("SPARSETRON_TEST_SLOWNESS", "1")))
"""Factor by which this machine is slower, at present, than the one on which `LIMIT` was chosen.

The calibration of a session of tests sets the variable.
"""
LIMIT: float = 240.0 * SLOWNESS
"""Seconds that a test waits for something that ends by itself.

Nothing is judged by how much of them it takes: a limit only ends what would stand still.
"""
