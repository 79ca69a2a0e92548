"""The prefix index as Python sees it: interface, snapshots, slots of ranks, columns. `indexer/native` implements it."""
