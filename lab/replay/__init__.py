"""Replayed configurations against the best fixed depth and an oracle, with plots."""
