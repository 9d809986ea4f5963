"""Measurements of SHAPE heads."""
