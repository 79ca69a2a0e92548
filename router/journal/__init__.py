"""The journal: what a router applied and decided, as records on the log; reading them back and replaying them."""
