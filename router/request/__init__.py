"""A request from its bytes to the end of its answer: reading, deciding, calls to workers, retries, replies."""
