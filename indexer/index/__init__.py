"""The prefix index: its interface, the implementation in Python, snapshots; `indexer/native` is the one in C++."""
