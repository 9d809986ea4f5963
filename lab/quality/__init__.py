"""Distance between the distributions of a network with rounded weights and of the network itself."""
