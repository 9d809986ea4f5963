"""The defaults against plain decoding over classes of prompts, with intervals."""
