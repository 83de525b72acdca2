"""Options that gradient paths bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import known_length, options_of, resolve, to_yaml
from tests.config.helpers import (
    REQUIRED,
    PruneConfig,
    SparseConfig,
    read,
    read_yaml,
    refused,
    refused_yaml,
    yaml_text,
)


def test_the_selected_path_brings_its_section() -> None:
    assert read().extensions == {}
    config = read("--grad-path", "sparse", "--sparse-density", "0.5", "--sparse-layers", "0", "1")
    sparse = SparseConfig(sparse_density=0.5, sparse_layers=(0, 1))
    assert config.extensions == {"sparse": sparse}
    config = read("--grad-path", "prune")
    assert config.extensions == {"prune": PruneConfig()}


def test_paths_may_share_options(tmp_path: Path) -> None:
    config = read("--grad-path", "prune+sparse", "--sparse-density", "0.5", "--prune-share", "0.1")
    both = {"prune": PruneConfig(prune_share=0.1), "sparse": SparseConfig(sparse_density=0.5)}
    assert config.extensions == both
    assert options_of(config, PruneConfig) is config.extensions["prune"]
    for text in (
        "sparse: {sparse_density: 0.5}\nprune: {prune_share: 0.1}\n",
        "sparse_density: 0.5\nprune_share: 0.1\n",
    ):
        text = yaml_text() + "grad_path: prune+sparse\n" + text
        assert read_yaml(tmp_path / "a.yaml", text) == config
    assert read_yaml(tmp_path / "b.yaml", to_yaml(config)) == config


def test_options_of_other_paths_are_refused(tmp_path: Path) -> None:
    assert refused("--sparse-density", "0.5") == (
        "--sparse-density: the gradient path dense does not take it; leave it out, or give "
        "--grad-path sparse or prune+sparse"
    )
    assert refused("--grad-path", "prune", "--sparse-style", "top").startswith(
        "--sparse-style: the gradient path prune does not take it"
    )
    text = yaml_text() + "prune:\n  prune_share: 0.1\n"
    assert refused_yaml(tmp_path / "a.yaml", text) == (
        "a.yaml:9: prune_share: the gradient path dense does not take it; leave it out, or give "
        "--grad-path prune or prune+sparse"
    )
    text = yaml_text() + "model:\n  prune_share: 0.1\n"
    assert refused_yaml(tmp_path / "a.yaml", text) == (
        "a.yaml:9: prune_share stands under model; it belongs under prune"
    )


def test_unknown_paths(tmp_path: Path) -> None:
    assert refused("--grad-path", "sparse2") == (
        "--grad-path: sparse2 is not known; must be one of dense, sparse, prune, prune+sparse; did "
        "you mean sparse?"
    )
    message = refused_yaml(tmp_path / "a.yaml", yaml_text() + "grad_path: topk\n")
    assert message.startswith("a.yaml:8: grad_path: topk is not known; must be one of dense, ")


def test_options_have_types_ranges_and_choices() -> None:
    line = ("--grad-path", "sparse")
    assert refused(*line, "--sparse-density", "10%") == (
        "--sparse-density: 10% is not a number; 10% is 0.1"
    )
    assert refused(*line, "--sparse-density", "0") == (
        "--sparse-density: 0.0 is out of range; must be more than 0"
    )
    assert refused(*line, "--sparse-style", "rnadom").endswith("did you mean random?")
    assert refused(*line, "--sparse-densty", "1").startswith(
        "--sparse-densty: no such flag; did you mean --sparse-density?"
    )


def test_the_path_has_the_last_word() -> None:
    assert read("--debug").run.debug
    assert refused("--debug", "--grad-path", "sparse").startswith("debug true: the path sparse")


@pytest.mark.parametrize(
    ("line", "at_once", "on_two_ranks"),
    [
        ("--train-iters 10", 10, 10),
        ("--train-samples 64 --global-batch-size 8", 8, 8),
        ("--train-samples 64", None, 16),  # the global batch is one microbatch of 2 per rank
        ("--train-iters 10 --skip-train", None, None),
    ],
)
def test_the_length_is_known_once_the_batch_is(
    line: str, at_once: int | None, on_two_ranks: int | None
) -> None:
    config = read("--lr", "1", *line.split(), base=REQUIRED)
    assert (known_length(config), known_length(resolve(config, 2))) == (at_once, on_two_ranks)
