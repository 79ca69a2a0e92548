"""The prefix index as Python sees it: its interface, its snapshots, checks of arguments. `indexer/native` is it."""
