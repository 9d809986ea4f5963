"""Heads that draft from a target's own hidden states; each family has a folder."""
