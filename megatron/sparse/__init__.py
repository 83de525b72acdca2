"""Which entries of a tensor are chosen: bitmaps, selection of the largest, exact over ranks."""
