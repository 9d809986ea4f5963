"""How many replicas a load needs, by simulation."""
