"""Exact enumeration: tabular networks, output distributions, and the acceptance of every verifier."""
