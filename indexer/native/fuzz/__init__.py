"""Fuzzers of the native tree (C++), and the inputs from which they start."""
