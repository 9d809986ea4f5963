"""Models and tokenizers from names, folders, files and objects."""
