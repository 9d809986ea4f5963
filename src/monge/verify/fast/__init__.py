"""Twins of the rules for many nodes at once: same noise, same verdict, on the device of their inputs."""
