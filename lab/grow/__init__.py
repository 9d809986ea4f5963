"""A target that says what the small one says, at the cost of a large one."""
