"""Training of heads: what every kind shares, the text that a target writes, and one module a kind."""
