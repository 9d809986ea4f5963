"""The test kit, for this library and for those who add to it.

Exact enumeration, tabular models, known-bad controls.
"""
