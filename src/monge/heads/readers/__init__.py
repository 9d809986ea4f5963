"""Published heads, read from the files in which they are published."""
