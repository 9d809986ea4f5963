"""Controllers on simulated streams, without networks."""
