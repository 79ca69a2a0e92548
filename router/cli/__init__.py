"""The commands of `router`, and the router that serves without a command (`serve`, `router_parts`)."""
