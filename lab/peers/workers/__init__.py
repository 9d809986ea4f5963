"""Programs that run one engine each, in an environment of its own.

Of this library they import `monge` only.
"""
