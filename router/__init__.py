"""Sends each request to the best worker rank, and explains the choice.

Each folder has one subject: its pure modules decide, the others do the I/O. `pyproject.toml` names the pure ones.
"""
