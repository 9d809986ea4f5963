"""Adapters to hosts, one host each: what `monge` looks like from inside another library."""
