"""Megatron-LM's own example scripts: one run names all that must be removed from them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from megatron.config import parse, resolve
from megatron.errors import ConfigError
from tests.config.helpers import PATHS, refusal

LLAMA3_8B = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
    --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
    --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
    --empty-unused-memory-level 1 --exit-duration-in-mins 235
    --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache
    --tiktoken-pattern v2 --split 99,1,0 --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --num-workers 1
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
    --distributed-timeout-minutes 60 --save checkpoints --load checkpoints
    --tensorboard-dir tensorboard"""
"""examples/llama/train_llama3_8b_h100_fp8.sh with mock data."""

GPT_345M = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 16 --lr 0.00015
    --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16
    --data-path my-gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --distributed-backend nccl --save checkpoints --load checkpoints"""
"""examples/pretrain_gpt_distributed.sh."""

LLAMA_REFUSED = {
    "--apply-layernorm-1p",
    "--decoupled-lr",
    "--decoupled-min-lr",
    "--fp8-format",
    "--fp8-param-gather",
}


def without(line: Sequence[str], flags: set[str]) -> list[str]:
    """The line without some of its flags and their values."""
    kept: list[str] = []
    keep = True
    for text in line:
        if text.startswith("--"):
            keep = text not in flags
        kept += [text] if keep else []
    return kept


def test_one_message_lists_all_that_llama_3_must_do_without() -> None:
    message = refusal(LLAMA3_8B.split())
    named = set(re.findall(r"\(\d+\) (--[\w-]+)", message))
    assert named == LLAMA_REFUSED
    assert message.startswith(f"{len(LLAMA_REFUSED)} settings are refused: (1) ")
    config = resolve(parse(without(LLAMA3_8B.split(), named), paths=PATHS), 8)
    assert config.model.num_query_groups == 8
    for flag in ("--cross-entropy-loss-fusion", "--fp8-amax-history-len"):
        assert any(notice.startswith(f"{flag}: ignored: ") for notice in config.notices)


@pytest.mark.parametrize("flag", sorted(LLAMA_REFUSED))
def test_the_message_names_nothing_that_could_stay(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}"):
        parse(without(LLAMA3_8B.split(), LLAMA_REFUSED - {flag}), paths=PATHS)


def test_the_345m_example_parses_as_it_is() -> None:
    config = resolve(parse(GPT_345M.split(), paths=PATHS), 4)
    assert config.total_iterations() == 500_000
