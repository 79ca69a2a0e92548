"""`router bench index`: the index beside the strongest peer. Parts that the peer runs use the standard library only."""
