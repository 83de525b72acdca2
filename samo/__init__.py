"""SAMO, sparsity-aware memory optimization (Singh and Bhatele 2023), as a gradient path.

Forward and backward use dense 16-bit parameters in which pruned weights are 0; gradients, fp32
master weights, moments and the messages between ranks have stored entries only.

=================================  =================================================================
`path`, `memory`                   `--grad-path samo`: what it builds, bytes for the planner
`options`                          its settings, and the settings that they exclude (no torch)
`mask`, `mask_file`                masks in memory, and their file format
`model_parts`                      counts and comparisons over tensors that ranks hold in parts
`tickets`, `pruning`               the masks at the start: their origin, and one-shot tickets
`early_bird`, `dsr`                masks during training: Early-Bird tickets, DSR
`schedule`                         the updates that change masks, and how many entries (no torch)
`layout`                           compressed storage of training state
`kernels`, `reference`             gather and scatter: fused on a GPU, and in plain torch
=================================  =================================================================

Imports of `megatron` are limited to its gradient interface, the stock layout, reducer and path, the
parallel groups and tensor shards, the selection of entries, helpers for errors and transfers and,
for the path, the options. No module loads torch before a path is built.
"""
