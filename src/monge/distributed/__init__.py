"""Decoding on many machines: Ray Serve, Ray Data, torchrun, batch files."""
