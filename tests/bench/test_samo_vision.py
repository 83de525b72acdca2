"""Image networks in the gradient-path benchmark: what is emulated, what is trained, the tables."""

from __future__ import annotations

import gc
import json
import math
import weakref
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.bench.path_results import DENSE_BYTES, SAMO_BYTES, result
from tools.bench.common.contenders import IMAGE_DECAY, LEARNING_RATE, MOMENTUM
from tools.bench.common.emulated import EmulatedModel, EmulatedNetwork, EngineTraining
from tools.bench.common.image_models import ImageTraining, smoke
from tools.bench.common.methods import method
from tools.bench.common.netlab import Network
from tools.bench.gradient_path import run as gradient_path
from tools.bench.gradient_path.contenders import alone, emulated, emulated_contenders
from tools.bench.gradient_path.report import SAVED, as_markdown, read, write
from tools.bench.gradient_path.rows import GradientPathTable, table
from tools.bench.gradient_path.targets import targets
from tools.bench.samo_memory.run import measure_image
from tools.planner.replay.image_networks import NAMES, network

pytestmark = pytest.mark.push


@pytest.mark.parametrize("name", NAMES)
def test_a_network_is_emulated_with_its_own_layers_and_seconds(name: str) -> None:
    training = emulated(name)
    assert isinstance(training, EmulatedNetwork)
    assert training.bucket is None, "the trainer's own"
    assert training.parameters == network(name).parameters
    shapes = {key: shape for part in training.parts for key, shape in part.shapes.items()}
    assert shapes == network(name).shapes
    assert sum(part.share for part in training.parts) == pytest.approx(1)
    vgg, wide = emulated("vgg19"), emulated("wide_resnet101")
    assert (wide.forward, wide.backward) == (1.5 * vgg.forward, 1.5 * vgg.backward)
    # VGG's first linear layer has most parameters and few operations: its gradient is early.
    first = next(part for part in vgg.parts if "classifier.0.weight" in part.shapes)
    assert first.share < 0.01


def test_gradients_of_an_emulated_network_are_those_of_backward() -> None:
    training = emulated("vgg19", smoke=True)
    made = training.gradients(3, "bfloat16")
    model = EmulatedModel(training, made)
    model.pace = 0.0
    model().backward()
    wanted = [gradient for layer in made for gradient in layer]
    params = dict(zip(model.names, model.parameters(), strict=True))
    assert [info.name for info in model.infos()] == list(params)
    for (name, param), gradient in zip(params.items(), wanted, strict=True):
        assert param.grad is not None and torch.equal(param.grad, gradient), name


@pytest.mark.parametrize("name", NAMES)
def test_an_image_network_trains_as_with_torchs_sgd(name: str) -> None:
    training = smoke(ImageTraining(name=name, images=1))
    ours = training.model("float32", seed=5)
    theirs = training.model("float32", seed=5)
    engine = EngineTraining(method("dense").flags, ours, alone(), name="dense", image=True)
    # As the benchmark trains: momentum, and L2 decay of all parameters.
    sgd = torch.optim.SGD(
        theirs.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=IMAGE_DECAY
    )
    for _ in range(3):
        loss = engine.step()
        sgd.zero_grad()
        other = theirs()
        other.backward()
        sgd.step()
        assert loss == pytest.approx(other.item(), rel=1e-5)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_ranks_train_on_their_own_images_and_the_same_network() -> None:
    training = smoke(ImageTraining(name="vgg19", images=1))
    one, two = (training.model("bfloat16", seed=seed) for seed in (0, 1))
    assert one().item() != two().item()
    for mine, its in zip(one.parameters(), two.parameters(), strict=True):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, its)
    images, labels = one._batch
    assert one().item() == cross_entropy(one.network(images).float(), labels).item()


def test_a_closed_contender_gives_its_memory_back() -> None:
    """Contenders of a large network take turns in memory, and autograd's hooks would hold them."""
    training = emulated("vgg19", smoke=True)
    gradients = {"bfloat16": training.gradients(0, "bfloat16")}
    (contender,) = emulated_contenders([method("samo-0.9")], training, gradients, alone())
    contender.pace(0.0)
    contender.step()
    held = weakref.ref(contender)
    contender.close()
    del contender
    gc.collect()
    assert held() is None


def _table(*, network: str | None = "vgg19", images: int = 0) -> GradientPathTable:
    protocol = "real" if images else "emulated"
    steps = {
        "compute": [(0.30, 0.0, 1.0)] * 3,
        "compute-bf16": [(0.20, 0.0, 1.0)] * 3,
        "dense": [(0.60, DENSE_BYTES, 1.0)] * 3,
        "dense-bf16": [(0.50, DENSE_BYTES / 2, 1.0)] * 3,
        "samo-0.9": [(0.30, SAMO_BYTES, 1.0)] * 3,
        "ddp-25mb": [(0.54, float("nan"), 1.0)] * 3,
    }
    found: dict[str, Any] = result(protocol, steps)
    found["settings"] |= {"network": network, "images": images}
    return table(found, Network(ranks=2, rate="800mbit"))


def test_what_is_saved_is_of_the_dense_row_as_wide() -> None:
    each = _table()
    assert each.title == "emulated computing, VGG-19, 2 ranks, 800mbit"
    assert each.saved("samo-0.9") == pytest.approx(1 - 0.30 / 0.50)
    assert each.saved("ddp-25mb") == pytest.approx(1 - 0.54 / 0.60)
    told = as_markdown(each)
    assert SAVED in told and "| samo-0.9 |" in told and " 40.0% |" in told
    found = [target for target in targets([each]) if "dense-bf16" in target.text]
    assert [target.met for target in found] == [True]
    assert "samo-0.9 / dense-bf16 0.600 (at most 1)" in found[0].text
    plain = _table(network=None)
    assert plain.title == "emulated computing, 2 ranks, 800mbit"
    assert SAVED not in as_markdown(plain)
    assert not [target for target in targets([plain]) if "dense-bf16" in target.text]


def test_a_report_keeps_networks_and_batches_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables = [_table(), _table(images=1), _table(network="wide_resnet101", images=8)]
    write(tmp_path, tables, None, {"cores": 2})
    again, _, _ = read(tmp_path)
    assert [each.title for each in again] == [
        "emulated computing, VGG-19, 2 ranks, 800mbit",
        "real computing, VGG-19, 1 image a rank, 2 ranks, 800mbit",
        "real computing, WideResnet-101, 8 images a rank, 2 ranks, 800mbit",
    ]
    assert again[0].saved("samo-0.9") == tables[0].saved("samo-0.9")


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_an_image_network_are_as_many_bytes_as_are_counted(name: str) -> None:
    dense, pruned = (measure_image(name, row, smoke=True) for row in ("dense-bf16", "samo-0.9"))
    small = network(name, 32, width=1 / 16)
    assert dense.state.entries == pruned.state.entries == small.parameters
    assert dense.state.f == 1.0 and dense.equation == 12 * small.parameters
    assert pruned.state.stored == small.stored(Fraction(9, 10))
    for kind, each in (("gradients", 2), ("master", 4), ("moments", 4)):
        assert dense.state.bytes[kind] == each * sum(_slices(name)), kind
    # Slices of a bucket begin at multiples of 64 entries, which is much for layers this narrow.
    for row, index in ((dense, 0), (pruned, 4 * pruned.state.indexed)):
        gaps = 64 * len(small.shapes)
        kinds, stored = row.state.bytes, row.state.stored
        assert kinds["parameters"] == 2 * small.parameters and kinds["index"] == index
        for kind, each in (("gradients", 2), ("master", 4), ("moments", 4)):
            assert each * stored <= kinds[kind] <= each * (stored + gaps), kind
        assert kinds["other"] < 1024


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cost", ["--cost", "samo-vision"]),
        ("--images 0", ["--images 0", "at least 1"]),
        ("--rounds 0", ["--rounds 0", "at least 2"]),
        ("--methods samo-1.5", ["--samo-sparsity: 1.5"]),
    ],
)
def test_wrong_settings_are_refused_in_a_line(
    flags: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gradient_path.main(["--set", "samo-vision", "--rates", "none", *flags.split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and all(word in told for word in words)


def _slices(name: str) -> tuple[int, int]:
    """Entries of the smoke network's buckets, of all but norms, and of norms.

    Each parameter has a slice of a multiple of 64 entries.
    """
    found = {True: 0, False: 0}
    for key, shape in network(name, 32, width=1 / 16).shapes.items():
        is_norm = ".bn" in f".{key}" or "downsample.1" in key
        found[is_norm] += -(-math.prod(shape) // 64) * 64
    return found[False], found[True]


@pytest.mark.full
def test_image_networks_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--set", "samo-vision", "--smoke", "--rates", "none", "--worlds", "2", "--rounds", "2"]
    names = ["dense", "dense-bf16", "samo-0.9", "ddp-fp16"]
    flags += ["--images", "2", "--out", str(tmp_path), "--methods", *names]
    assert gradient_path.main(flags) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    kinds = [(found["protocol"], found["model"]) for found in report["tables"]]
    assert kinds == [
        ("emulated", "VGG-19"),
        ("real", "VGG-19, 2 images a rank"),
        ("emulated", "WideResnet-101"),
        ("real", "WideResnet-101, 2 images a rank"),
    ]
    for found in report["tables"]:
        rows = {row["method"]: row for row in found["rows"]}
        assert list(rows) == ["compute", "compute-bf16", *names]
        matrices, norms = _slices("vgg19" if "VGG" in found["model"] else "wide_resnet101")
        # A ring of two ranks sends every byte once. Real norms keep fp32 gradients in bf16.
        wide = 4 if found["protocol"] == "real" else 2
        assert rows["dense"]["bytes_sent"] == 4 * (matrices + norms)
        assert rows["dense-bf16"]["bytes_sent"] == 2 * matrices + wide * norms
        assert rows["samo-0.9"]["bytes_sent"] < 0.15 * rows["dense-bf16"]["bytes_sent"]
        assert 0.1 < found["stored"]["samo-0.9"] < 0.12
        assert all(len(turns) == 2 for turns in found["turns"].values())
    assert (tmp_path / "figure.png").is_file() and SAVED in (tmp_path / "README.md").read_text()
