"""Distributions, what is drawn from them, and trees of drawn tokens."""
