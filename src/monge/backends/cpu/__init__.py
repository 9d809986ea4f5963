"""The compiled backend on CPUs: its compiler, kernels and stored code."""
