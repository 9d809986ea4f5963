"""Training of heads: the shared loop and losses, text written by the target, and one module per kind."""
