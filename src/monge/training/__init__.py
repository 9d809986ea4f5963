"""Training of heads: the shared loop and losses, text of the target, and a module for each kind."""
