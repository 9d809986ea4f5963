"""Training of SHAPE heads."""
