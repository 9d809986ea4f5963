"""Programs that run one engine each, in an environment of its own; of this library they import `monge` only."""
