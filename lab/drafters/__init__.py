"""Drafters on equal terms: one target, the same prompts, as many drafted nodes."""
