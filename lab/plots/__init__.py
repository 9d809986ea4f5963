"""Plots of the JSON files that commands write."""
