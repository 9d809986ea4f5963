"""The checks of a certificate, one file each. They raise `MismatchError`, which names the field."""
