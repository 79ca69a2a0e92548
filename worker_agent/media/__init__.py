"""Media of requests, and embeddings on their way between workers: files, HTTP and time around the rules of `core/`."""
