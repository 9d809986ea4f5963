"""Controllers decide how much to draft in the coming round."""
