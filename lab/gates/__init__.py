"""Recorded figures, and a command that measures them again."""
