"""The OpenAI HTTP interface as routers and agents read it: requests, options, errors. `requests` is the entry point."""
