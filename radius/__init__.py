"""Radius, range-based gradient sparsity (Zheng and Zhang 2025), as a gradient path.

Between two resamples all data-parallel ranks send the same entries of each matrix, so an all-reduce
of one short vector adds them up. Entries that are not sent are kept in a residual until the next
resample, which sends everything and selects the entries of the next interval.

    path, memory          `--grad-path radius`: options, refused pairs, bytes (no torch)
    schedule              the settings, and the check that a run has a resample (no torch)
    reducer               the messages of each step, and the state that all ranks share
    places, stats         stored entries of shared tensors; numbers for the log
    part_selection        selection from parts of buckets, whole or in shards
    torch_update          the updates of a torch optimizer, to select by (for `ddp_hook`)
    bucket                one bucket: selection, residual, state in a checkpoint
    residual              gradients that were not sent: kept in a buffer, or dropped
    index                 the number of selected entries, and the choice of their index
    bucket_index          the base classes of an index, stored by
      bitmap_index          one bit per entry, with kernels in Triton (`kernels`) or compiled for
                            a CPU (`native`), both tested against plain torch (`reference`), and by
      offset_index          int32 offsets within chunks that fit in cache
    agreement             comparison of selections that ranks made on their own
    ddp_hook, functional  Radius in other training loops, with or without torch's DDP
    baselines             the methods that the paper compares with

`megatron.sparse` finds the k largest entries and counts bits. Other imports of `megatron` are
limited to its gradient interface, the stock layout and reducer, and, for the paths, the options. No
module loads torch before a path is built.
"""
