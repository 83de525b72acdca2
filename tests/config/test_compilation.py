"""Layers are compiled by default where that breaks no promise, and one flag decides otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import resolve, to_yaml
from megatron.config.compilation import choose_compilation
from tests.config.helpers import read

TENSOR = ("--tensor-model-parallel-size", "2")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("more", [(), TENSOR, ("--deterministic-mode",)])
@pytest.mark.parametrize("triton", [False, True])
def test_the_flag_decides_everywhere(device: str, more: tuple[str, ...], triton: bool) -> None:
    for flags, on in ((("--compile",), True), (("--compile", "false"), False)):
        choice = choose_compilation(read(*flags, *more), device, triton=triton)
        assert choice.on == on and f"as --compile {str(on).lower()} asks" in str(choice)


@pytest.mark.parametrize(
    ("flags", "device", "triton", "told"),
    [
        ("", "cuda", True, "on, the default on CUDA; --compile false"),
        ("--pipeline-model-parallel-size 2", "cuda", True, "on, "),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule message-driven", "cuda", True, "on"),
        ("--recompute-granularity full", "cuda", True, "on, "),
        ("", "cpu", True, "off, the default on a CPU"),
        (" ".join(TENSOR), "cuda", True, "off, the default with tensor parallelism"),
        ("--deterministic-mode", "cuda", True, "off, since deterministic_mode is on"),
        ("", "cuda", False, "off, since Triton, which"),
    ],
)
def test_the_default_has_a_reason(flags: str, device: str, triton: bool, told: str) -> None:
    config = read(*flags.split())
    choice = choose_compilation(config, device, triton=triton, compiler=True)
    assert str(choice).startswith(told)
    # The device is found out later than the configuration is written.
    assert "  compile: null\n" in to_yaml(resolve(config, 2))


def test_triton_needs_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    told = str(choose_compilation(read(), "cuda", triton=True))
    assert told.startswith("off, since Triton finds no C compiler")
    for name, variable in (("clang", None), ("my-cc", "my-cc")):
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
        if variable is not None:
            monkeypatch.setenv("CC", variable)
        assert choose_compilation(read(), "cuda", triton=True).on
        (tmp_path / name).unlink()
