"""Verifiers, one a file: rules that keep drafted tokens and preserve the target's law."""
