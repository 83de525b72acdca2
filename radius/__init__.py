"""Radius, range-based gradient sparsity (Zheng and Zhang 2025), as a gradient path.

Between two resamples the data-parallel ranks send the same entries of each matrix, so a plain
all-reduce of one short vector adds them up; what is not sent waits in a residual until the next
resample, which also chooses the entries anew.

=========================  ========================================================================
`path`, `memory`           `--grad-path radius`: options, refused pairs, bytes (no torch) `schedule`
the settings, and the check that a resample falls into a run (no torch) `reducer`
the messages of each step, and the state that all ranks share `places`, `stats`          stored
entries of shared tensors; numbers for the log `bucket`                   one bucket: choice,
residual, state in a checkpoint `residual`                 the unsent part: in a buffer of its own,
or lost `index`                    the interface of an index of sent entries, kept as `bitmap_index`
a bit for each entry, with kernels in Triton (`kernels`) or compiled for a
                           CPU (`native`), both tested against plain torch (`reference`), or as
`offset_index`             int32 offsets within chunks, which stay in cache
`agreement`                ranks that choose alone compare their choices
`ddp_hook`, `functional`   Radius in other training loops, with or without torch's DDP
`baselines`                the methods that the paper compares with
=========================  ========================================================================

`megatron.sparse` finds the k largest entries and counts bits. Other imports of `megatron` are
limited to its gradient interface, the stock layout and reducer, and, for the paths, the options;
nothing here is loaded with torch until a path is built.
"""
