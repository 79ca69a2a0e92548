"""`router bench oracle`: our choice beside the peer's real one."""
