"""Techniques that save memory by computing more."""
