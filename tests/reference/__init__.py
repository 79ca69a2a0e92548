"""The rules of a router's decision state, in Python that is slow and obvious.

The router decides by one core in C++. This package says what the core does: each module states rules and computes them
with dicts, lists and floats, one candidate and one block at a time. A journal that is applied to both gives the same
records and the same checkpoint tables, byte for byte: floats are computed by the same steps in the same order, and rows
come in the order in which dicts were filled.

    state.py      `ReferenceState`: apply records, tick, decide, tables
    following.py  a recorder that repeats with the reference what a router does, and compares

It uses what the product has in Python (fleet, breakers, trust, eligibility, policies as data), nothing of the core.
"""
