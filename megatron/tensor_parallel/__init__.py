"""Tensor parallelism: sharded layers, dropout streams and cross-entropy."""
