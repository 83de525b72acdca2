"""Optimizers on flat buckets, learning-rate schedules and the fp16 loss scale."""
