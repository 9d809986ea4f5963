"""Verifiers: rules that keep drafted tokens and preserve the target's law."""
