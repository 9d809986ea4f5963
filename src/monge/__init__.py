"""Lossless acceleration of large language models by speculative decoding, seen as optimal transport."""
