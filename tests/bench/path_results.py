"""Made-up results of rank 0 of the gradient-path benchmark."""

from __future__ import annotations

from typing import Any

from tools.bench.common.alpha_beta import AlphaBetaLink
from tools.bench.gradient_path.messages import Sizes

SLOW = AlphaBetaLink(alpha=0.001, beta=1e-8, ranks=2)
SIZES = Sizes(
    shapes={"first": (500, 500), "bias": (500,), "last": (1000, 250)},
    buckets=[["last"], ["bias"], ["first"]],
)
STORED = {"first": 25_000, "bias": 500, "last": 50_000}
"""Stored entries of each parameter of a pruned network."""
DENSE_BYTES, SPARSE_BYTES = 4 * 500_512.0, 4 * 200_512.0
SAMO_BYTES, SAMO_RADIUS_BYTES = 2 * 75_512.0, 2 * 30_512.0


def result(protocol: str, steps: dict[str, list[tuple[float, float, float]]]) -> dict[str, Any]:
    """Return the results that rank 0 writes: seconds, bytes and density of each step."""
    return {
        "settings": {"protocol": protocol, "interval": 4},
        "steps": {
            name: [
                {
                    "seconds": seconds,
                    "blocked": 0.01,
                    "bytes_sent": sent,
                    "density": density,
                    "counted": 1.01 * sent,
                }
                for seconds, sent, density in found
            ]
            for name, found in steps.items()
        },
        "links": {str(size): [SLOW.all_reduce(size)] * 3 for size in (100_000, 1_000_000)},
        "parameters": [[name, list(shape)] for name, shape in SIZES.shapes.items()],
        "coordinates": {
            name: {"buckets": SIZES.buckets, "stored": STORED if "samo" in name else {}}
            for name in steps
        },
        "arrivals": {
            "compute": {"ready": {"last": 0.2, "bias": 0.3, "first": 0.3}, "backward": 0.3},
            "compute-bf16": {"ready": {"last": 0.1, "bias": 0.2, "first": 0.2}, "backward": 0.2},
        },
    }
