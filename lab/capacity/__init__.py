"""The number of replicas that a load needs, by simulation."""
