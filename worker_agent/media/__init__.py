"""Media of requests, and transfers of embeddings between workers: which are accepted, and how they are fetched."""
