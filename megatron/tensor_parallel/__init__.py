"""What the tensor-parallel ranks of one model replica share: dropout streams and cross-entropy."""
