"""The loop, and what it needs to run networks: caches, sampling, stops, sessions."""
