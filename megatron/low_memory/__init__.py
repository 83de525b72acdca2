"""Techniques that trade arithmetic for memory."""
