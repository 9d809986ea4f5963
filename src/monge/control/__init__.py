"""Controllers, one a file: how much to draft in the coming round."""
