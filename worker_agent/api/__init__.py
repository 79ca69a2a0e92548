"""The OpenAI endpoints of a worker: a request becomes an engine's, its tokens become an answer."""
