"""The baselines of Radius: naive top-k (section 6.5 of the paper) and PowerSGD."""
