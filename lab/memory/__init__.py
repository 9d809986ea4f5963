"""What a decoder holds, over thousands of rounds in every backend."""
