"""Drafters. A drafter draws the candidates of a round."""
