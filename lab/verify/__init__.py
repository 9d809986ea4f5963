"""The time that every acceptance rule takes at one node or one tree."""
