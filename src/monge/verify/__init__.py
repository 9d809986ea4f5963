"""Acceptance rules, one a file: which drafted tokens are kept so that the committed law is the target's."""
