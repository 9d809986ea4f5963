"""Measurements: the same prompts, the same models and the same process for every arm that is compared."""
