"""The gradient path of docs/extending.md keeps the contracts."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.contract import test_contracts as contracts
from tests.contract.harness import PathCase
from tests.contract.pairs import WIRES, refusals
from tests.ranks import Ranks

CASE = PathCase("randomk", {"randomk_density": 0.3}, lossless=False)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.docs import extending

    monkeypatch.setitem(GRADIENT_PATHS, extending.NAME, extending.MODULE.RandomKPath())


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    yield
    GRADIENT_PATHS.pop(CASE.name, None)


def on_rank_with_the_page(groups: ProcessGroups, function: Callable[..., Any], *args: Any) -> Any:
    from tests.docs import extending

    GRADIENT_PATHS[extending.NAME] = extending.MODULE.RandomKPath()
    try:
        return function(groups, *args)
    finally:
        del GRADIENT_PATHS[extending.NAME]


class RanksWithThePage:
    """Rank processes that know the path of the page while they run a function."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._ranks.run(world, on_rank_with_the_page, function, *args)


def laws() -> list[Any]:
    """Every contract test of a path, with each of its own parameters at two ranks."""
    found = []
    for name, test in vars(contracts).items():
        if not name.startswith("test_") or "case" not in inspect.signature(test).parameters:
            continue
        choices: list[list[dict[str, Any]]] = []
        for mark in [mark for mark in test.pytestmark if mark.name == "parametrize"]:
            names, values = mark.args
            keys = [names] if isinstance(names, str) else names
            rows = [[value] if isinstance(names, str) else value for value in values]
            choices.append([dict(zip(keys, row, strict=True)) for row in rows])
        for chosen in itertools.product(*choices):
            own = {key: value for row in chosen for key, value in row.items()}
            found.append(pytest.param(test, own, id="-".join([name, *map(str, own.values())])))
    return found


LAWS = laws()


def test_the_laws_are_found() -> None:
    assert len({law.values[0] for law in LAWS}) >= 15


@pytest.mark.parametrize(("law", "chosen"), LAWS)
def test_the_path_of_the_page_keeps(
    law: Callable[..., None], chosen: dict[str, Any], ranks: Ranks
) -> None:
    given: dict[str, Any] = {"ranks": RanksWithThePage(ranks), "case": CASE, "world": 2, **chosen}
    law(**{name: given[name] for name in inspect.signature(law).parameters})


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_it_keeps_what_other_wires_do_not_send(ranks: Ranks, wire: str) -> None:
    law: Callable[..., None] = contracts.test_2_3_mean_is_equal_on_every_rank_and_nothing_is_lost
    law(RanksWithThePage(ranks), replace(CASE, wire=wire), 2, 64.0, torch.float32)


def test_its_settings_are_flags_and_wires_that_need_feedback_are_refused() -> None:
    assert {wire: bool(refusals(replace(CASE, wire=wire))) for wire in WIRES} == {
        None: False,
        "fp32": False,
        "bf16": False,
        "int8": True,
        "int4": True,
    }
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1 "
    flags += "--micro-batch-size 1 --train-iters 1 --mock-data --grad-path randomk"
    config = parse([*flags.split(), "--randomk-density", "0.5"], paths=GRADIENT_PATHS)
    assert config.values()["randomk_density"] == 0.5
