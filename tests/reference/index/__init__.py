"""The prefix index in Python that is slow and obvious: what the one in C++ (`indexer/native/`) must answer.

Tests tell both the same and compare answers, dumps, digests and snapshots; only their memory differs. It uses what the
product has in Python (checks of arguments, formats, events), nothing of the C++.
"""
