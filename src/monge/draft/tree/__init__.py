"""Tree builders, one a file: which nodes get children, how many, and how they are drawn."""
