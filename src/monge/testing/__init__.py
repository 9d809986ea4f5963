"""The test kit, for this library and for those who add to it: exact enumeration, tabular models, known-bad controls."""
