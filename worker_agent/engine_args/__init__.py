"""The arguments of an engine: layers, forced values, checks, and where each value is from."""
