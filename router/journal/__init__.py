"""The journal: applied records and decisions of a router in the log; reading and replaying them."""
