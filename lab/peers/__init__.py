"""This library beside other engines, with the same two models."""
