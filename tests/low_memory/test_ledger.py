"""The memory ledger: its three columns agree, on every grid and for every task."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from torch import nn

from megatron.config import parse, resolve
from megatron.data.vocabulary import Vocabulary
from megatron.errors import ConfigError
from megatron.low_memory import ledger as ledger_module
from megatron.low_memory.dry_run import DryTranslation
from megatron.low_memory.ledger import COLUMNS, ColumnName, MemoryLedger, memory_ledger
from megatron.low_memory.memory_recorder import layer_of
from megatron.low_memory.operation_graph import wide_resnet_graph
from megatron.low_memory.planned_memory import MemoryColumn
from megatron.low_memory.strategies import stored_entries
from megatron.metrics import memory as memory_module
from megatron.tasks.gpt import LoadedGPT
from megatron.tensor_parallel.products import must_widen
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from pretrain_translation import TRANSLATION_TASK
from pretrain_vision import VISION_TASK
from tests.tiers import sampled
from tools.planner import ledger_report
from tools.planner.ledger_report import draw_ledger, ledger_lines

pytestmark = pytest.mark.push

REPO = Path(__file__).resolve().parents[2]
VOCABULARY = 101
GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 48 --mock-data "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --micro-batch-size 2 "
    "--train-iters 5 --lr 1e-3"
)

STILL = "--attention-dropout 0 --hidden-dropout 0"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TURNS = f"{PP} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 16"
FULL = "--recompute-granularity full"
GPT_CASES = {
    "fp32": (1, 0, STILL),
    "bf16": (1, 0, f"{STILL} --bf16"),
    "bf16 gradients": (1, 0, f"{STILL} --bf16 --grad-reduce-in-bf16 --optimizer sgd"),
    "dropout": (1, 0, "--hidden-dropout 0.1 --attention-dropout 0"),
    "gated": (1, 0, f"{STILL} --swiglu --normalization RMSNorm --position-embedding-type rope"),
    "full": (1, 0, f"{STILL} {FULL}"),
    "full by two": (1, 0, f"{STILL} {FULL} --recompute-num-layers 2 --recompute-method uniform"),
    "selective": (1, 0, f"{STILL} --recompute-granularity selective"),
    "microbatches": (1, 0, f"{STILL} --global-batch-size 8"),
    "tensor": (2, 1, f"{STILL} {TP}"),
    "first stage": (2, 0, f"{STILL} {PP} --global-batch-size 16"),
    "last stage": (2, 1, f"{STILL} {PP} --bf16 --global-batch-size 16"),
    "in turns": (2, 0, f"{STILL} {TURNS}"),
    "zero": (4, 3, f"{STILL} --bf16 --use-distributed-optimizer"),
    "nodes": (4, 3, f"{STILL} --bf16 --dp-inner-size 2 --overlap-param-gather"),
    "grid": (8, 5, f"{STILL} {TP} {PP} --sequence-parallel --bf16 --use-distributed-optimizer"),
}


ON_PUSH = ("bf16 gradients", "gated", "selective", "grid")

UNMEASURED: tuple[ColumnName, ...] = ("planned", "tracked")


def gpt(
    flags: str,
    *,
    world: int = 1,
    rank: int = 0,
    columns: Collection[ColumnName] = COLUMNS,
    flops: bool = False,
) -> MemoryLedger:
    config = resolve(parse(f"{GPT} {flags}".split(), paths=GRADIENT_PATHS), world)
    opened = LoadedGPT(GPT_TASK, config, Vocabulary(size=VOCABULARY))
    return memory_ledger(
        opened,
        config,
        GRADIENT_PATHS,
        world=world,
        rank=rank,
        vocabulary=VOCABULARY,
        columns=columns,
        flops=flops,
    )


def vision(flags: str, *, columns: Collection[ColumnName] = COLUMNS) -> MemoryLedger:
    base = "--mock-data --num-layers 10 --width-factor 0.5 --img-h 32 --img-w 32 --num-classes 10"
    base += " --micro-batch-size 3 --train-iters 5 --lr 1e-2 --optimizer sgd"
    config = parse(f"{base} {flags}".split(), paths=GRADIENT_PATHS, task=VISION_TASK.config)
    config = resolve(config, 1)
    return memory_ledger(VISION_TASK.open(config), config, GRADIENT_PATHS, columns=columns)


def translation(
    flags: str, *, columns: Collection[ColumnName] = COLUMNS, flops: bool = False
) -> MemoryLedger:
    base = "--data-path none --encoder-layers 3 --decoder-layers 2 --embed-dim 32 --max-tokens 100"
    base += " --micro-batch-size 1 --train-iters 5 --lr 1e-3"
    config = parse(f"{base} {flags}".split(), paths=GRADIENT_PATHS, task=TRANSLATION_TASK.config)
    config = resolve(config, 1)
    return memory_ledger(
        DryTranslation(config, 90, 70), config, GRADIENT_PATHS, columns=columns, flops=flops
    )


def check(ledger: MemoryLedger, *, within: float = 0.01) -> None:
    """Compare the columns: planned and tracked within 1 %, tracked and measured within 2 %."""
    assert not ledger.missing
    planned, tracked, measured = (
        ledger.columns[name] for name in ("planned", "tracked", "measured")
    )
    for kind in ("model", "optimizer", "stored"):
        assert getattr(planned, kind) == pytest.approx(getattr(tracked, kind), rel=within), kind
        assert getattr(tracked, kind) == pytest.approx(getattr(measured, kind), rel=0.02), kind
    assert planned.layers.keys() == tracked.layers.keys() == measured.layers.keys()
    for layer, size in planned.layers.items():
        assert tracked.layers[layer] == pytest.approx(size, rel=0.01, abs=600), layer
    assert sum(tracked.layers.values()) == tracked.stored


def check_peak(ledger: MemoryLedger, *, widened: int = 0) -> None:
    """Compare the planned peak with the tracked one.

    Plans count the largest gradients, and neither temporaries of single operators nor copies of
    another dtype, which in networks of this size are up to 6 % of the peak. `widened` is the size
    of the fp32 operands of the largest convolution, on a processor that computes it so.
    """
    planned, tracked = ledger.columns["planned"], ledger.columns["tracked"]
    assert planned.forward is not None and planned.backward is not None
    assert planned.other is not None
    at_peak = planned.forward + planned.backward + planned.other
    assert planned.total == planned.model + planned.optimizer + at_peak
    assert planned.other == tracked.other
    if widened:
        assert 0.94 * planned.total <= tracked.total <= planned.total + widened
        return
    assert planned.total == pytest.approx(tracked.total, rel=0.06)
    assert planned.forward == pytest.approx(tracked.forward, rel=0.06)


@pytest.mark.parametrize("case", sampled(GPT_CASES, ON_PUSH))
def test_columns_agree_for_a_gpt(case: str) -> None:
    world, rank, flags = GPT_CASES[case]
    ledger = gpt(flags, world=world, rank=rank)
    check(ledger)
    if rank == 0 and "selective" not in flags:
        assert ledger.columns["planned"].total == pytest.approx(
            ledger.columns["tracked"].total, rel=0.1
        )


def test_a_profile_of_nodes_stays_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that use one fake mode at a time make it fail now and then."""
    started: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    world, rank, flags = GPT_CASES["nodes"]
    gpt(flags, world=world, rank=rank, columns=UNMEASURED)
    assert started == []


def test_a_peak_at_the_gradient_of_the_output_layer_is_planned() -> None:
    """With few tokens and many entries of the vocabulary, no activation is as large."""
    few = "--micro-batch-size 1 --seq-length 8 --make-vocab-size-divisible-by 1024"
    ledger = gpt(f"{STILL} {FULL} {few}", columns=UNMEASURED)
    planned, tracked = ledger.columns["planned"], ledger.columns["tracked"]
    assert ledger.peak is not None
    assert (ledger.peak.module, ledger.peak.phase) == ("output_layer", "backward")
    # The weights of 1024 x 64 entries in fp32, and the gradient of 8 hidden states.
    assert planned.backward == 4 * (1024 * 64 + 8 * 64)
    assert tracked.backward == pytest.approx(planned.backward, rel=0.01)
    assert tracked.total == pytest.approx(planned.total, rel=0.01)


@pytest.mark.parametrize(
    "flags", sampled(["", "--bf16", "--width-factor 1", "--img-h 48"], ["--bf16", "--img-h 48"])
)
def test_columns_agree_for_a_wide_resnet(flags: str) -> None:
    ledger = vision(flags)
    check(ledger, within=0.01)
    # groups.0.0.conv1 takes 3 images of 16 channels, and has 8: operands and gradients, in fp32.
    operands = 4 * (16 + 8 + 16) * 3 * 32 * 32
    is_widened = "--bf16" in flags and must_widen(torch.bfloat16, torch.device("cpu"))
    check_peak(ledger, widened=operands if is_widened else 0)
    assert ledger.flops is not None and ledger.flops.recomputed == 0
    assert ledger.flops.forward + ledger.flops.backward == ledger.flops.formula


TRANSLATORS = [
    "",
    "--bf16",
    "--dropout 0 --weight-dropout 0 --attention-dropout 0",
    FULL,
    f"{FULL} --recompute-method uniform --recompute-num-layers 2 --dropout 0",
]


@pytest.mark.parametrize("flags", sampled(TRANSLATORS, TRANSLATORS[1::2]))
def test_columns_agree_for_a_dc_transformer(flags: str) -> None:
    ledger = translation(flags)
    check(ledger)
    check_peak(ledger)


def test_planned_gradients_of_a_wide_resnet_are_those_of_its_last_hidden_state() -> None:
    # WRN-10-0.5 ends with 32 channels at 8 x 8 positions: two gradients of 3 images. Stored in 32
    # bit: the entries of the images and of each layer, as `test_none_counts_what_autograd_saves`.
    planned = vision("", columns=["planned"]).columns["planned"]
    assert planned.backward == 2 * 3 * 32 * 8 * 8 * 4
    assert planned.forward == planned.stored == sum(planned.layers.values())
    graph = wide_resnet_graph(depth=10, width=0.5)
    entries = stored_entries(graph, graph.needed)[0] + graph.size("relu")
    # A mean and an inverse deviation of each channel that is normalized, and a count of images.
    channels = (16 + 8) + (8 + 16) + (16 + 32) + 32
    assert planned.stored == 4 * (3 * entries + 2 * channels + 1)
    half = vision("--bf16", columns=["planned"]).columns["planned"]
    assert half.backward == planned.backward // 2


def test_planned_gradients_of_a_dc_transformer_are_those_of_the_head_or_of_what_is_recomputed() -> (
    None
):
    # The output matrix of 70 rows, and a hidden state: 4 sentences of 25 tokens, 32 wide.
    wide = 4 * 4 * 25 * 32
    plain = translation("", columns=["planned"]).columns["planned"]
    assert plain.backward == 4 * 70 * 32 + wide
    assert plain.forward == plain.stored
    full = translation(FULL, columns=["planned"]).columns["planned"]
    # Recomputed are the activations of the last layer of the decoder but its input. The encoder's
    # output is kept for the layers of the decoder.
    assert full.backward == plain.layers["decoder.layers.1"] - wide + wide
    assert full.forward == full.stored + wide - full.layers["head"]


def test_recomputed_activations_are_backward_ones() -> None:
    ledger = gpt(GPT_CASES["full by two"][2], columns=UNMEASURED)
    planned, tracked = ledger.columns["planned"], ledger.columns["tracked"]
    assert planned.forward == pytest.approx(tracked.forward, rel=0.05)
    assert planned.backward == pytest.approx(tracked.backward, rel=0.05)


def test_recomputed_flops_stand_apart() -> None:
    plain, full = (
        gpt(f"{STILL} {flags}", columns=["tracked"], flops=True).flops for flags in ("", FULL)
    )
    assert plain is not None and full is not None
    assert (plain.forward, plain.backward, plain.recomputed) == (full.forward, full.backward, 0)
    # Layers run forward once more, up to the last product, whose output nobody needs; the output
    # layer does not.
    tokens, hidden, vocabulary = 2 * 48, 64, 104
    last = 4 * 2 * tokens * 4 * hidden * hidden
    assert full.recomputed == plain.forward - 2 * tokens * hidden * vocabulary - last


def test_only_what_is_asked_for_is_counted() -> None:
    planned = gpt(STILL, columns=["planned"], flops=True)
    assert set(planned.columns) == {"planned"} and not planned.missing
    assert planned.flops is None and planned.peak is None and planned.process_peak is None
    tracked = gpt(STILL, columns=["tracked"])
    assert set(tracked.columns) == {"tracked"} and tracked.flops is None
    assert tracked.peak is not None


def test_the_peak_names_its_operator_and_the_course_has_all_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = gpt(STILL, columns=UNMEASURED)
    peak, tracked = ledger.peak, ledger.columns["tracked"]
    assert peak is not None
    assert ledger.peak_text == f"peak at `{peak.operator}` of {peak.phase}, in {peak.module}"
    assert peak.total == max(sample.total for sample in ledger.samples) == tracked.total
    at_peak = (peak.forward, peak.backward, peak.other)
    assert at_peak == (tracked.forward, tracked.backward, tracked.other)
    phases = [sample.phase for sample in ledger.samples]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "update"]
    assert ledger.samples[-1].forward < 0.01 * tracked.stored

    arrows: list[tuple[str, tuple[int, float]]] = []
    annotate = Axes.annotate

    def noted(self: Axes, text: str, xy: tuple[int, float], **how: Any) -> object:
        arrows.append((text, xy))
        return annotate(self, text, xy, **how)

    monkeypatch.setattr(Axes, "annotate", noted)
    monkeypatch.setattr(ledger_report, "MOST_POINTS", 50)
    draw_ledger(tmp_path / "memory.png", ledger)
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    # Each point of the timeline is a run of so many operators.
    run = -(-len(ledger.samples) // 50)
    position = ledger.samples.index(peak) // run
    assert arrows == [(ledger.peak_text, (position, peak.total / 1e6))]
    text = "\n".join(ledger_lines(ledger))
    assert "stored by layers.3" in text and ledger.peak_text in text


def test_a_model_that_does_not_fit_is_tracked() -> None:
    # Operators are tracked one by one. Sharded states keep the update of 6.6e9 parameters short,
    # and fp32 the products, which a CPU without units for bf16 would compute in many blocks.
    flags = "--num-layers 2 --hidden-size 16384 --num-attention-heads 64 --seq-length 64"
    flags += " --use-distributed-optimizer"
    ledger = gpt(f"{STILL} {flags}", world=64, rank=5, columns=UNMEASURED)
    planned, tracked = ledger.columns["planned"], ledger.columns["tracked"]
    assert tracked.total > 40e9
    assert tracked.model == pytest.approx(planned.model, rel=0.01)
    assert tracked.stored == pytest.approx(planned.stored, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "tracked", "measured"),
    [
        (
            "--grad-path samo --samo-sparsity 0.5 --samo-pruning random",
            "grad_path: samo chooses entries by value",
            "grad_path: samo keeps masks or residuals",
        ),
        (
            "--optimizer-cpu-offload --bf16",
            "optimizer_cpu_offload: updates run in threads",
            "optimizer_cpu_offload: fp32 copies and moments are in the host's memory",
        ),
    ],
)
def test_what_cannot_be_tracked_or_measured_is_planned_and_said(
    flags: str, tracked: str, measured: str
) -> None:
    ledger = gpt(f"{STILL} {flags}")
    assert set(ledger.columns) == {"planned"}
    assert ledger.missing["tracked"].startswith(tracked)
    assert ledger.missing["measured"].startswith(measured)
    lines = list(ledger_lines(ledger))
    assert [line for line in lines if "is missing" in line] == [
        f"{name} is missing: {ledger.missing[name]}" for name in ("tracked", "measured")
    ]


def test_a_step_that_a_gpu_does_not_hold_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    ledger = gpt(f"{STILL} --device cuda", columns=["planned", "measured"])
    assert set(ledger.columns) == {"planned"}
    assert "does not fit" in ledger.missing["measured"]
    assert "--no-measured" in ledger.missing["measured"]


@pytest.mark.parametrize(
    ("module", "file"), [(memory_module, "STATUS"), (ledger_module, "CLEAR_REFS")]
)
def test_a_system_that_does_not_tell_memory_is_not_measured(
    module: ModuleType, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = tmp_path / "proc" / "file"
    monkeypatch.setattr(module, file, lost)
    ledger = gpt(STILL)
    assert set(ledger.columns) == {"planned", "tracked"} and set(ledger.missing) == {"measured"}
    assert ledger.missing["measured"].startswith(f"{lost}: No such file or directory")
    assert ledger.process_peak is None


def test_a_pie_takes_what_is_stored_where_no_peak_is_known() -> None:
    column = MemoryColumn(model=1, optimizer=2, stored=3, total=10)
    assert column.kinds == {"model": 1, "optimizer": 2, "activations": 3}
    # A rank that holds no activations at the peak has none in the pie.
    peak = replace(column, forward=0, backward=4)
    assert peak.kinds == {"model": 1, "optimizer": 2, "activations": 4}


def test_networks_without_a_plan_are_tracked() -> None:
    ledger = vision("--vision-backbone-type vgg19 --num-layers none --width-factor 0.0625")
    assert set(ledger.columns) == {"tracked", "measured"}
    assert "vgg19" in ledger.missing["planned"]
    for kind in ("model", "optimizer", "stored"):
        tracked, measured = (getattr(ledger.columns[n], kind) for n in ("tracked", "measured"))
        assert tracked == pytest.approx(measured, rel=0.02)


def test_a_rank_outside_of_the_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank: 4"):
        gpt(STILL, world=4, rank=4)


def test_layers_are_told_by_their_numbers() -> None:
    class Chunk(nn.Module):
        layer_numbers = range(6, 9)

    chunk = Chunk()
    names = {
        "layers.1.mlp.dense_h_to_4h": "layers.7",
        "embedding.word_embeddings": "embedding",
        "final_norm": "head",
        "network.groups.2.3.bn1": "groups.2.3",
        "network.conv0": "conv0",
        "network.layer1.0.conv1": "layer1.0",
        "network": "head",
        "encoder.layers.4.conv": "encoder.layers.4",
    }
    for module, layer in names.items():
        assert layer_of(chunk, module) == layer
