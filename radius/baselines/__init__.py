"""The baselines of Radius: top-k (section 6.5 of the paper), PowerSGD, and two of our own."""
