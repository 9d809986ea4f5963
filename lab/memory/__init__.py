"""Memory of a decoder, over thousands of rounds in every backend."""
