"""The baselines of Radius: naive top-k (section 6.5 of the paper), PowerSGD, low-rank plus sparse,
and round-robin.
"""
