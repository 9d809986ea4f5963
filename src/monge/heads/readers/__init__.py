"""Heads that others have published, read from the files in which they are published."""
