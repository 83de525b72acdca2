"""Page-locked host memory: as much as asked for, registered with CUDA for as long as it is used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.optimizer.pinned_memory import pinned_zeros


class Cudart:
    """The two calls of CUDA's runtime."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.held: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0 and address % 4096 == 0 and address not in self.held
        if self.answer == 0:
            self.held[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0


def use(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check)


def test_it_is_registered_while_a_view_of_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    use(cudart, monkeypatch)
    whole, empty = pinned_zeros(1_000_003, torch.float32), pinned_zeros(0, torch.float32)
    assert cudart.held[whole.data_ptr()] == 4 * 1_000_003  # 2^22 bytes would be torch's
    assert whole.dtype == torch.float32 and not whole.any() and empty.numel() == 0
    part = whole[10:20].fill_(1.0)
    del whole, empty
    assert len(cudart.held) == 1 and part.sum() == 10
    del part
    assert not cudart.held


def test_a_refusal_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(answer=2)
    use(cudart, monkeypatch)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        pinned_zeros(10, torch.float32)
    assert not cudart.held
