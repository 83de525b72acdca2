"""Radius, range-based gradient sparsity (Zheng and Zhang 2025), as a gradient path.

Between two resamples the data-parallel ranks send the same entries of each matrix, so a plain
all-reduce of one short vector adds them up; what is not sent waits in a residual until the next
resample, which also chooses the entries anew.

=======================  ==========================================================================
`path`, `memory`         `--grad-path radius`: options, refusals, bytes for the planner (no torch)
`reducer`                what is sent when; what all ranks share
`places`, `telling`      where stored entries lie in tensors that ranks share; what is logged
`bucket`                 one bucket: what is chosen in it, what waits, what a checkpoint holds
`residual`               what was not sent: in its own buffer, in the gradient buffer, or lost
`index`                  which entries are sent, and how that is kept:
`bitmap`, `marked`       a bit for each, where there are kernels: in Triton (`kernels`) or compiled
                         for a CPU (`native`), both held to plain torch (`reference`)
`chunk_index`, `pieces`  else int32 offsets within chunks, which stay in cache
`ddp_hook`, `by_hand`    the same in other people's loops, with or without torch's DDP
`baselines`              the methods that the paper compares with
=======================  ==========================================================================

`megatron.sparse` finds the k largest entries and counts bits. Other imports of `megatron` are
limited to its gradient interface, the stock layout and reducer, and, for the paths, the options;
nothing here is loaded with torch until a path is built.
"""
