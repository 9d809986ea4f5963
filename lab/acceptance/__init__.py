"""Acceptance of every rule, drafting and tree shape over the distributions of a real pair."""
