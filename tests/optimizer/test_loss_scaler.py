"""The fp16 loss scale, step by step, by Megatron's rule."""

from __future__ import annotations

from megatron.optimizer.loss_scaler import ConstantScaler, DynamicScaler


def scaler() -> DynamicScaler:
    return DynamicScaler(scale=1024.0, min_scale=128.0, window=3, hysteresis=2)


def feed(scaler: DynamicScaler, overflows: str) -> list[float]:
    """Scale after each step: 'x' overflowed, '.' did not."""
    scales = []
    for mark in overflows:
        scaler.update(overflow=mark == "x")
        scales.append(scaler.scale)
    return scales


def test_hysteresis_forgives_the_first_overflow_only() -> None:
    assert feed(scaler(), "xxx") == [1024, 512, 256]


def test_clean_window_doubles_and_restores_hysteresis() -> None:
    assert feed(scaler(), "x..." + "xx") == [1024, 1024, 1024, 2048, 2048, 1024]


def test_overflow_starts_the_window_anew() -> None:
    assert feed(scaler(), "..x...") == [1024, 1024, 1024, 1024, 1024, 2048]


def test_never_below_the_least() -> None:
    assert feed(scaler(), "x" * 8)[-1] == 128


def test_state_round_trip_goes_on_alike() -> None:
    first = scaler()
    feed(first, "x.")
    second = scaler()
    second.load(first.state())
    assert feed(first, "..x..x") == feed(second, "..x..x")


def test_a_shorter_window_than_the_checkpoint_has_counted_grows_at_once() -> None:
    longer = DynamicScaler(scale=1024.0, min_scale=128.0, window=9, hysteresis=2)
    feed(longer, ".....")
    shorter = scaler()
    shorter.load(longer.state())
    assert feed(shorter, "....") == [2048, 2048, 2048, 4096]


def test_constant_scale_stays() -> None:
    constant = ConstantScaler(8.0)
    constant.update(overflow=True)
    assert constant.scale == 8.0 and constant.state() == {}
