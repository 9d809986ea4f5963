"""Drafters, one a file: where the candidates of a round come from."""
