"""Who is decoded when: the queue of generations and the thread that decodes them."""
