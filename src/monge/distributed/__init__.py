"""Decoding on many machines: Ray Serve, Ray Data."""
