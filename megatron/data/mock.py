"""Made-up samples that a model can learn: for `--mock-data`, where there is no corpus."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MODULUS = 256
_STEPS = 4


class MockDataset:
    """Sample k counts up from a random token in steps of 1 to 4, a function of (seed, split, k).

    Two tokens give the step away, so the loss of a working model falls towards zero within a few
    hundred iterations. Ids stay below min(vocab_size, 256).
    """

    def __init__(
        self, num_samples: int, *, sequence_length: int, vocab_size: int, seed: int, split: int = 0
    ) -> None:
        self._num_samples = num_samples
        self._sequence_length = sequence_length
        self._modulus = min(vocab_size, _MODULUS)
        self._seed = (seed, split)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        rng = np.random.default_rng([*self._seed, index])
        start, step = int(rng.integers(self._modulus)), int(rng.integers(1, _STEPS + 1))
        places = np.arange(self._sequence_length + 1, dtype=np.int64)
        return (start + step * places) % self._modulus
