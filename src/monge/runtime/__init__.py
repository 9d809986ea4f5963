"""This process: its clock, its threads, and notices for the person who waits."""
