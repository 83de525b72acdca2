"""Everything here needs a GPU; `tools/bench/gpu/tests.py` runs it where there is no pytest."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if "compile" in item.path.name:  # torch's compiler causes warnings itself
                item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def device() -> torch.device:
    """The GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is seen")
    return torch.device("cuda", 0)
