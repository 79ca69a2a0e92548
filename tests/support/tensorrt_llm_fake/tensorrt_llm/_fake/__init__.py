"""Stands in for a GPU: a formula for tokens, a paged cache, an iteration loop, and the faults that a test asks for."""
