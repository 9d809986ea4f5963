"""Drafters, one a file. A drafter draws the candidates of a round."""
