"""What Radius is measured against: naive top-k (section 6.5 of the paper) and PowerSGD."""
