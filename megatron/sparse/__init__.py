"""Choices of entries of a tensor: bitmaps, exact selection of the largest over ranks."""
