"""SAMO, sparsity-aware memory optimization (Singh and Bhatele 2023), as a gradient path.

Forward and backward run on dense 16-bit parameters in which pruned weights are 0; gradients, fp32
master weights and moments exist for the others alone, and so do the messages between ranks.

=========================  ========================================================================
`path`, `memory`           `--grad-path samo`: options, refusals, bytes for the planner (no torch)
`mask`                     masks on disk, and between logical shape and a rank's memory
`pruning`                  which weights exist from the start: the largest, or a random draw
`early_bird`, `rewiring`   which exist while a run goes on: Early-Bird tickets, DSR
`schedule`                 when DSR rewires, and how much: the report's defaults (no torch)
`storage`                  bits of a sparse network as the DSR report counts them (no torch)
`layout`                   compressed storage: a gradient in, a weight out, by a shared index
`kernels`, `reference`     the same moves on a GPU in one pass each, and in plain torch
=========================  ========================================================================

Imports of `megatron` are limited to its gradient interface, the stock layout, reducer and path, the
selection of entries and, for the path, the options; nothing here is loaded with torch until a path
is built.
"""
