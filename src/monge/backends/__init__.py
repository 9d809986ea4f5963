"""Backends: ways to run a network."""
