"""How far the distribution of a network with rounded weights is from that of the network itself."""
