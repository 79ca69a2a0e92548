"""The commands of `router`, beside `serve`: one module each."""
