"""Folds the log into a prefix index: the overlap of each worker rank with a request's prefix.

`follow/` folds the ranks' streams into the index. `index/` is the index's interface, `native/` the index itself, in
C++, and `service/` the process around it: NATS in, HTTP out. The router imports only `embedded`.
"""
