"""SAMO, sparsity-aware memory optimization (Singh and Bhatele 2023), as a gradient path.

Forward and backward run on dense 16-bit parameters in which pruned weights are 0; gradients, fp32
master weights and moments exist for the others alone, and so do the messages between ranks.

=================================  =================================================================
`path`, `memory`                   `--grad-path samo`: what it builds, bytes for the planner
`options`, `refused_pairs`         its flags, and what they exclude (no torch)
`mask`                             masks on disk, and between logical shape and a rank's memory
`parts`                            what is counted and compared where ranks hold parts of a model
`pruning`, `shares`, `ticket`      which weights exist from the start, and how many
`early_bird`                       which from a ticket on, drawn while the dense run goes on
`rewiring`, `regrowth`,            dynamic sparse reparameterization: what it decides, does to a
`schedule`, `storage`              tensor, when, and in how many bits
`layout`                           compressed storage: a gradient in, a weight out, by one index
`kernels`, `reference`             the same moves on a GPU in one pass each, and in plain torch
=================================  =================================================================

Imports of `megatron` are limited to its gradient interface, the stock layout, reducer and path, the
selection of entries and, for the path, the options; nothing here is loaded with torch until a path
is built.
"""
