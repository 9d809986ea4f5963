"""Test kit, also for parts in other packages: exact enumeration and tabular models."""
