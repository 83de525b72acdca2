"""The baselines of Radius: top-k (section 6.5 of the paper), PowerSGD, DeMo, and two of our own."""
