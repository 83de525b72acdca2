"""Selection of tensor entries: bitmaps, and exact choice of the largest across ranks."""
