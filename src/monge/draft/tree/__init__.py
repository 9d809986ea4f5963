"""Tree builders decide which nodes get children, how many, and how they are drawn."""
