"""Sends each request to the best worker rank, and explains the choice.

A folder is a subject: its pure modules decide, the others do the I/O. `pyproject.toml` names the pure ones.
"""
