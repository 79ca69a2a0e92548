"""The OpenAI HTTP interface as routers and agents read it: requests, options, errors. `decoding` is the entry point."""
