"""Tensor parallelism: sharded layers and vocabulary, dropout streams, cross-entropy."""
