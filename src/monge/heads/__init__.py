"""Heads that draft from a target's own hidden states, one family a folder."""
