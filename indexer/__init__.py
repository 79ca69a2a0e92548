"""Folds the log into a prefix index: the overlap of each worker rank with a request's prefix.

`follow/` folds rank streams into the index, `index/` is its interface, `native/` the index, in C++, `service/` the
process around it: NATS in, HTTP out. `embedded` is what the router imports.
"""
