"""The page of means within a node: bytes by hand, and every row is accepted by the program."""

from __future__ import annotations

import pytest

from megatron.config import parse, resolve
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.nodes.run import (
    FLAGS,
    RANKS,
    ROWS,
    NodeRow,
    as_markdown,
    expected,
    main,
    sent_by_a_node,
)


def row(name: str, *, seconds: float = 1.0, reported: float = 0.0, counted: float = 0.0) -> NodeRow:
    return NodeRow(name=name, seconds=seconds, reported=reported, counted=counted)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_accepted(name: str) -> None:
    config = resolve(
        parse([*FLAGS, *ROWS[name], "--train-iters", "60"], paths=GRADIENT_PATHS), RANKS
    )
    assert config.parallel.dp_inner_size == (2 if name.endswith("-nodes") else 1)


def test_a_node_sends_what_one_rank_sends_or_its_vector_between_two_nodes() -> None:
    flat = row("dense-bf16", reported=150.0)  # 2 x 3/4 of a vector of 100
    nodes = row("dense-bf16-nodes", reported=200.0)
    assert expected(flat, [flat, nodes]) == 150
    assert expected(nodes, [flat, nodes]) == 100
    assert expected(nodes, [nodes]) is None, "the vector is known from the other row"
    assert expected(row("powersgd-4"), [row("powersgd-4")]) is None


def test_packets_are_counted_without_headers() -> None:
    before = [{"rank": 0, "bytes": 100, "packets": 1}, {"rank": 2, "bytes": 0, "packets": 0}]
    after = [{"rank": 0, "bytes": 1166, "packets": 2}, {"rank": 2, "bytes": 2132, "packets": 2}]
    assert sent_by_a_node({"before": before, "after": after}) == (1000 + 2000) / 2


def test_the_page_relates_steps_to_dense_and_bytes_to_their_formula() -> None:
    rows = [
        row("dense-bf16", seconds=0.2, reported=1.5e6, counted=1.53e6),
        row("dense-bf16-nodes", seconds=0.1, reported=2e6, counted=1.01e6),
    ]
    page = as_markdown({"4 ranks on 2 nodes, 200mbit": rows}, load="0.5")
    assert "load was 0.5 at the start" in page.replace("\n", " ")
    assert "## 4 ranks on 2 nodes, 200mbit" in page
    assert "| dense-bf16 | 200 | 1.00 | 1.53 | 1.50 | 1.020 |" in page
    assert "| dense-bf16-nodes | 100 | 0.50 | 1.01 | 1.00 | 1.010 |" in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--rates", "none"], "--rates none: nodes need links between them; give a rate"),
    ],
)
def test_wrong_usage_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert capsys.readouterr().err == f"nodes: {message}\n"
