"""Exact acceptance of every rule: at one node, and on small trees, by enumeration, closed forms and linear programs."""
