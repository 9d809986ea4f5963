"""Twins of the rules for many nodes at once.

Same noise, same verdict, on the device of their inputs.
"""
