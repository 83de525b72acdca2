"""Data parallelism: gradients in buckets, their mean over ranks, and the gradient paths."""
