"""Media of requests, and embeddings on their way between workers: which are taken, how they are fetched."""
