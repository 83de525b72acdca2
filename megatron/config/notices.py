"""What a run announces once although nothing is wrong: settings that have no effect, and defaults
that surprise."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container
from pathlib import Path

from megatron.config.config import Config
from megatron.config.folders import real_path
from megatron.config.running import OffloadConfig
from megatron.low_memory.checkpoint_interval import describe_interval

Notice = str | None
WORKING_LOSS_SCALE = 2**16
"""A loss scale at which float16 GPT runs settle."""
LARGEST_CUDNN_HEAD, LARGEST_FLASH_HEAD = 128, 256
"""Head sizes up to which cuDNN's and flash attention train on every GPU that has them."""


def notices(config: Config, given: Container[str]) -> list[str]:
    """Lines about a checked configuration; `given` are the fields that the user set."""
    about = [notice(config) for notice in _ANY] + [notice(config, given) for notice in _DEFAULTS]
    return [line for line in about if line]


def cuda_notices(config: Config) -> list[str]:
    """Lines about settings that keep fast attention away, for a run that has found a GPU."""
    return [line for notice in _ON_CUDA if (line := notice(config))]


def describe_recomputation(config: Config) -> str:
    """Describe the recomputation interval of the fullest stage; empty where layers are not
    recomputed in groups of one length."""
    if config.recompute.recompute_method != "uniform":
        return ""
    layers, interval = config.model.num_layers, config.recompute.recompute_num_layers or 1
    return describe_interval(layers, config.parallel.longest_run(layers), interval)


def _saves_once(c: Config) -> Notice:
    interval, iters = c.checkpoint.save_interval, c.training.train_iters
    if interval is None or iters is None or interval <= iters:
        return None
    return f"save_interval {interval} is more than train_iters {iters}: only the end is saved"


def _prints_nothing(c: Config) -> Notice:
    interval, iters = c.logging.log_interval, c.training.train_iters
    if iters is None or interval <= iters:
        return None
    return f"log_interval {interval} is more than train_iters {iters}: no step is printed"


def _finetunes_nothing(c: Config) -> Notice:
    if not c.checkpoint.finetune or c.checkpoint.load is not None:
        return None
    return "finetune is on without --load: there are no weights to take, training begins with new"


def _data_unread(c: Config) -> Notice:
    paths = (c.data.data_path, c.data.train_data_path, c.data.valid_data_path)
    if not c.data.mock_data or not any((*paths, c.data.test_data_path)):
        return None
    return "mock_data is on: the data paths are not read"


def _groups_unread(c: Config) -> Notice:
    if c.model.group_query_attention or c.model.num_query_groups == 1:
        return None
    groups = c.model.num_query_groups
    return f"num_query_groups {groups} is not read without --group-query-attention"


def _scores_kept(c: Config) -> Notice:
    if not c.masks_grouped_queries or c.run.device == "cpu":
        return None
    return (
        f"reset_attention_mask with num_query_groups {c.model.query_groups}: on CUDA most fused "
        f"kernels of torch do not take both, and {_scores(c)}"
    )


def _scores(c: Config) -> str:
    m, t = c.model, c.training
    heads = m.num_attention_heads // c.parallel.tensor_model_parallel_size
    size = 4 * t.micro_batch_size * heads * m.seq_length**2
    return (
        f"a layer then keeps {m.seq_length} x {m.seq_length} scores of each head in fp32, "
        f"{size / 2**20:,.0f} MiB a microbatch"
    )


# What torch's attention kernels take on CUDA: ATen/native/transformers/cuda/sdp_utils.cpp,
# `check_cudnn_dropout`, `check_cudnn_tensor_shapes`, `check_head_dim_size_flash` and
# `check_head_dim_size_mem_efficient`; flash attention pads heads in transformers/attention.cpp.


def _attention_without_cudnn(c: Config) -> Notice:
    size, dropout = c.model.head_dim, c.model.attention_dropout
    takes_heads = _is_16_bit(c) and size % 8 == 0 and size <= LARGEST_CUDNN_HEAD
    if not takes_heads or (16 * dropout).is_integer():
        return None
    return (
        f"attention_dropout {dropout}: on CUDA torch does not run cuDNN attention, its first "
        "choice on Hopper and Blackwell GPUs, with this dropout; --attention-dropout 0 allows it"
    )


def _odd_heads(c: Config) -> Notice:
    size, multiple = c.model.head_dim, 8 if _is_16_bit(c) else 4
    if size % multiple == 0:
        return None
    odd = f"head size {size} is not a multiple of {multiple}: on CUDA"
    if _is_16_bit(c) and size <= LARGEST_FLASH_HEAD and not c.data.reset_attention_mask:
        padded = -(-size // multiple) * multiple
        return (
            f"{odd} flash attention alone takes it, by copying queries, keys and values to heads "
            f"of {padded}"
        )
    return f"{odd} no fused kernel of torch takes it, and {_scores(c)}"


def _wide_heads(c: Config) -> Notice:
    m = c.model
    if not _is_16_bit(c) or m.head_dim <= LARGEST_FLASH_HEAD or m.head_dim % 8:
        return None
    wide = f"head size {m.head_dim} is more than {LARGEST_FLASH_HEAD}: on CUDA"
    if m.query_groups < m.num_attention_heads:
        return f"{wide} no fused kernel of torch takes it with query groups, and {_scores(c)}"
    return f"{wide} memory-efficient attention takes it, but neither flash nor cuDNN attention"


def _is_16_bit(c: Config) -> bool:
    return c.precision.param_dtype != "float32"


def _offload_unread(c: Config) -> Notice:
    if c.offload.optimizer_cpu_offload or c.offload == OffloadConfig():
        return None
    return "the offload_ settings are not read without --optimizer-cpu-offload"


def _tracker_off(c: Config) -> Notice:
    if c.logging.wandb_exp_name is None or c.logging.wandb_project is not None:
        return None
    return f"wandb_exp_name {c.logging.wandb_exp_name} is not read without --wandb-project"


def _slow_format(c: Config) -> Notice:
    if not c.precision.fp16 or c.run.device != "cpu":
        return None
    return "fp16 on the CPU saves memory and no time: its products run in fp32 on most CPUs"


def _moved_folder(c: Config) -> Notice:
    for name, folder in (("run_dir", c.run.run_dir), ("save", c.checkpoint.save)):
        if folder is not None and real_path(folder) != Path(os.path.abspath(folder)):
            return f"{name} {folder} is really {real_path(folder)}"
    return None


def _first_loss_scale(c: Config, given: Container[str]) -> Notice:
    p = c.precision
    if not p.fp16 or p.loss_scale is not None or "initial_loss_scale" in given:
        return None
    skipped = 1 + round(math.log2(p.initial_loss_scale / WORKING_LOSS_SCALE))
    return (
        f"initial_loss_scale is 2^{math.log2(p.initial_loss_scale):.0f}, Megatron-LM's default: "
        f"about {skipped} steps are skipped at the start"
    )


def _overlap(c: Config, given: Container[str]) -> Notice:
    if "overlap_grad_reduce" in given:
        return None
    return "overlap_grad_reduce is on by default (Megatron-LM: off); the numbers are the same"


_ANY: tuple[Callable[[Config], Notice], ...] = (
    _saves_once,
    _prints_nothing,
    _finetunes_nothing,
    _data_unread,
    _groups_unread,
    _scores_kept,
    _offload_unread,
    _tracker_off,
    _slow_format,
    _moved_folder,
)
_DEFAULTS: tuple[Callable[[Config, Container[str]], Notice], ...] = (_first_loss_scale, _overlap)
_ON_CUDA: tuple[Callable[[Config], Notice], ...] = (
    _attention_without_cudnn,
    _odd_heads,
    _wide_heads,
)
