"""What a router takes of memory in one process and in several, with an index that is full."""
