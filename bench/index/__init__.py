"""`router bench index`: the index beside the strongest peer. Much of it is standard library alone: the peer runs it."""
