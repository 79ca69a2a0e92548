"""Folds the log into a prefix index: which worker rank holds how much of a request's prefix.

`core/` is the index and its stream state machine, pure. Around it: NATS in, HTTP out. `native/` is the C++ core.
"""
