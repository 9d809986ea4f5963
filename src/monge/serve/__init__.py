"""Serving: requests of many clients over one set of parts."""
