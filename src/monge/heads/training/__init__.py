"""What the training of every kind of head shares."""
