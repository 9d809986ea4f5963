"""Exact acceptance of every rule: at a node, and on small trees, by enumeration, closed forms and linear programs."""
