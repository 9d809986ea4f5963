"""The checks of a certificate, one file each, in the order in which a round was made."""
