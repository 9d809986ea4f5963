"""Heads on text that the target writes, with every alignment and without."""
