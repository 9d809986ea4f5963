"""How the models that ship in the package were made."""
