"""Radius, range-based gradient sparsity (Zheng and Song 2025), as a gradient path.

Gradients of matrices travel as one fixed set of entries, the same on every data-parallel rank, so
that they can be added up by an ordinary all-reduce; what is not sent stays in a residual and the
set is chosen anew, from the optimizer's own update, every so many steps. `baselines` holds the
methods that the paper compares with. Imports of `megatron` are limited to its gradient interface
and stock reducer, and nothing here is loaded with torch until a path is built.
"""
