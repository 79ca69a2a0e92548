"""A request's prompt as tokens and sequence hashes, with which a KV cache is looked up."""
