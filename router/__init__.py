"""Sends each request to the best worker rank, and can say why.

A folder is a subject: pure modules decide, the others perform. `pyproject.toml` names the pure ones.
"""
