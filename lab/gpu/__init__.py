"""The five-minute check of a machine with a GPU."""
