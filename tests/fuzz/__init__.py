"""Fuzzers of the native tree (C++), and their seed inputs."""
