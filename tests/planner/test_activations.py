"""Tests of planned activation memory against the tensors that autograd really saves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config import parse, resolve
from megatron.data.data_loader import DeviceMicrobatch
from megatron.data.vocabulary import Vocabulary
from megatron.documents import Documents
from megatron.memory_estimate import Activations
from megatron.model.attention import SelfAttention
from megatron.model.rotary import rotary_table
from megatron.parallel.groups import ProcessGroups
from megatron.pipeline.stage import Stage
from megatron.tasks.gpt import LoadedGPT
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from tests.planner.grids import planned, run
from tests.ranks import Ranks
from tests.ranks import grid as groups_of

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 48 --mock-data "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --train-iters 5 --lr 1e-3"
)
STILL = "--attention-dropout 0 --hidden-dropout 0"
LLAMA = (
    "--swiglu --group-query-attention --num-query-groups 2 --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
)
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full"
DOCUMENTS = np.repeat([[0, 1, 2]], [13, 16, 19], axis=1)
CASES = {
    "GPT-2": (1, STILL),
    "GPT-2 bf16": (1, f"{STILL} --bf16"),
    "dropout": (1, "--hidden-dropout 0.1 --attention-dropout 0"),
    "dropout of attention": (1, "--bf16"),
    "exact GELU": (1, f"{STILL} --gelu erf"),
    "documents": (1, f"{STILL} --reset-attention-mask"),
    "documents bf16": (1, f"{STILL} --reset-attention-mask --bf16"),
    "documents sequence": (2, f"{STILL} {TP} --sequence-parallel --reset-attention-mask {LLAMA}"),
    "documents recomputed": (1, f"{STILL} {FULL} --reset-attention-mask"),
    "GPT-2 fp16": (1, f"{STILL} --fp16"),
    "gated": (1, f"{STILL} {LLAMA}"),
    "gated bf16": (1, f"{STILL} {LLAMA} --bf16"),
    "head norms": (1, f"{STILL} --qk-layernorm"),
    "head norms bf16": (1, f"{STILL} --qk-layernorm --bf16"),
    "head norms gated": (1, f"{STILL} {LLAMA} --qk-layernorm"),
    "head norms gated bf16": (1, f"{STILL} {LLAMA} --qk-layernorm --bf16"),
    "head norms dropout": (1, "--qk-layernorm --hidden-dropout 0"),
    "head norms dropout gated": (1, f"{LLAMA} --qk-layernorm --hidden-dropout 0"),
    "head norms tensor": (2, f"{STILL} {TP} {LLAMA} --qk-layernorm --sequence-parallel"),
    "groups": (1, f"{STILL} --group-query-attention --num-query-groups 2"),
    "uniform": (1, f"{STILL} {FULL}"),
    "uniform 2": (1, f"{STILL} {FULL} --recompute-method uniform --recompute-num-layers 2"),
    "block": (1, f"{STILL} {FULL} --recompute-method block --recompute-num-layers 3"),
    "selective": (1, f"--recompute-granularity selective {LLAMA}"),
    "tensor": (2, f"{STILL} {TP}"),
    "tensor gated": (2, f"{STILL} {TP} {LLAMA}"),
    "sequence": (2, f"--attention-dropout 0 {TP} --sequence-parallel"),
    "sequence alone": (2, f"{STILL} {TP} --sequence-parallel --micro-batch-size 1 {LLAMA}"),
    "sqrt": (1, f"{STILL} {FULL} --recompute-method sqrt"),
    "grid": (4, f"--attention-dropout 0 {TP} {PP} --sequence-parallel --bf16"),
    "stages": (2, f"{STILL} {PP} --bf16"),
    "in turns": (
        2,
        f"{STILL} {PP} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4",
    ),
}


def saved_on_rank(groups: ProcessGroups, flags: str, vocabulary: int) -> list[tuple[int, int]]:
    """Return saved bytes for each chunk of this rank's stage.

    The numbers are the bytes saved by a forward, and by recomputing its largest recomputed part.
    """
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), groups.world.size)
    parallel = config.parallel
    groups = groups_of(
        groups, tp=parallel.tensor_model_parallel_size, pp=parallel.pipeline_model_parallel_size
    )
    opened = LoadedGPT(GPT_TASK, config, Vocabulary(size=vocabulary))
    chunks = opened.chunks(groups, torch.device("cpu"))
    stage = Stage(chunks)
    batch, length = config.training.micro_batch_size, config.model.seq_length
    ids = torch.zeros(batch, length, dtype=torch.int64)
    documents = None
    if config.data.reset_attention_mask:
        documents = Documents.of(DOCUMENTS.repeat(batch, 0), torch.device("cpu"))
    microbatch = DeviceMicrobatch(
        index=0,
        tokens=ids,
        labels=ids.clone(),
        position_ids=None,
        loss_mask=None,
        documents=documents,
        counted=ids.numel(),
    )
    found: list[tuple[int, int]] = []
    for number, chunk in enumerate(chunks):
        known = [*chunk.parameters(), *(chunk._rotary or ()), *vars(microbatch).values()]
        here = length // (groups.tp.size if parallel.sequence_parallel else 1)
        hidden = None
        if chunk.embedding is None:
            dtype = next(chunk.parameters()).dtype
            hidden = torch.randn(batch, here, config.model.hidden_size).to(dtype)
        saved = SavedActivations([each for each in known if isinstance(each, torch.Tensor)])
        with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            stage.forward(0, microbatch, hidden, chunk=number)
        again = SavedActivations([each for each in known if isinstance(each, torch.Tensor)])
        recomputed = [span for span in chunk.spans if span.recomputed]
        if recomputed:
            longest = max(recomputed, key=lambda span: span.stop - span.start)
            rotary, shape = chunk._rotary_at(None, length), (batch, here, config.model.hidden_size)
            inner = torch.randn(shape, dtype=next(chunk.parameters()).dtype, requires_grad=True)
            again.known.add(inner.untyped_storage().data_ptr())
            with saved_tensors_hooks(again.pack, lambda tensor: tensor):
                chunk._span_runner(longest)(inner, rotary, documents)
        found.append((saved.nbytes, again.nbytes))
    return found


class SavedActivations:
    """A count of the bytes of storages saved for backward, each once, without known storages."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.nbytes = 0
        self._alive: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.known.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
            self._alive.append(tensor)  # so that no other storage reuses the address
        return tensor


@pytest.mark.parametrize("case", CASES)
def test_activations_are_those_saved(ranks: Ranks, case: str) -> None:
    world, flags = CASES[case]
    grid = planned(f"{MODEL} {flags}", world, vocabulary=97)
    sizes = Activations(grid)
    found = run(ranks, world, saved_on_rank, f"{MODEL} {flags}", 97)
    for rank, chunks in enumerate(found):
        stage = grid.dims.coordinates(rank).pp
        for number, (saved, again) in enumerate(chunks):
            plan = sizes.chunk(stage, number)
            assert plan.saved == pytest.approx(saved, rel=0.02)
            if again:
                assert plan.again == pytest.approx(again, rel=0.02)


GROUPS = "--group-query-attention --num-query-groups 2"
MASKED = f"{STILL} --reset-attention-mask"


@pytest.mark.parametrize(
    "more",
    [GROUPS, LLAMA, f"{GROUPS} --qk-layernorm", f"{GROUPS} --reset-attention-mask"],
)
def test_attention_without_a_fused_kernel_keeps_what_torch_saves(
    more: str,
) -> None:
    """torch's fallback attention is the same code on a CPU and on CUDA."""
    grid = planned(f"{MODEL} {STILL} {more}", 1, vocabulary=97)
    model, dtype = grid.config.model, getattr(torch, grid.config.precision.param_dtype)
    attention = SelfAttention(model, dtype=dtype, device=torch.device("cpu"))
    batch, length = grid.config.training.micro_batch_size, model.seq_length
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(batch, length, model.hidden_size, dtype=dtype)
    documents = None
    if grid.config.data.reset_attention_mask:
        documents = Documents.of(np.zeros((batch, length), np.int64), hidden.device)
    rotary = None
    if model.position_embedding_type == "rope":
        rotary = rotary_table(
            length, head_dim=model.head_dim, percent=1.0, base=1e4, device=hidden.device
        )
    saved = SavedActivations([hidden, *attention.parameters(), *(rotary or ())])
    with sdpa_kernel(SDPBackend.MATH), saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        attention(hidden, rotary, documents)
    sizes = Activations(replace(grid, device="cuda"))
    assert sizes.attention == pytest.approx(saved.nbytes, rel=0.02)


def kept_by_attention(flags: str, device: str) -> int:
    grid = planned(f"{MODEL} --seq-length 4096 {flags}", 1, vocabulary=97)
    return Activations(replace(grid, device=device)).attention


def test_query_groups_in_fp32_keep_their_scores_on_cuda_alone() -> None:
    scores = 4 * 2 * 4 * 4096**2  # fp32, 2 samples and 4 heads
    assert kept_by_attention(f"{STILL} {GROUPS}", "cuda") > scores
    for flags in (MASKED, f"{STILL} {GROUPS} --bf16"):
        assert kept_by_attention(flags, "cuda") < scores
    assert kept_by_attention(f"{STILL} {GROUPS}", "cpu") < scores
    still, dropped = (kept_by_attention(f"{GROUPS} {more}", "cuda") for more in (STILL, ""))
    assert dropped - still == 5 * scores // 4
    grid = planned(f"{MODEL} --seq-length 4096 {STILL} {GROUPS}", 1, vocabulary=97)
    assert Activations(replace(grid, device="cuda")).of_stage(0).gradients == 2 * scores


def test_documents_cost_a_copy_of_the_context_where_no_kernel_takes_all_of_them() -> None:
    def more(flags: str, device: str) -> int:
        one, many = (kept_by_attention(f"{f} {flags}", device) for f in (STILL, MASKED))
        return many - one

    context = 4 * 2 * 4096 * 64
    assert more("", "cpu") == more("", "cuda") == context
    assert more("--bf16", "cuda") == more("--bf16", "cpu") == more(f"--bf16 {GROUPS}", "cuda") == 0
    dropped = [f"--attention-dropout 0.1 --bf16 {mask}" for mask in ("", "--reset-attention-mask")]
    one, many = (kept_by_attention(flags, "cuda") for flags in dropped)
    assert many - one == context // 2
