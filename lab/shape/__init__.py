"""What is asked about SHAPE, answered by measuring."""
