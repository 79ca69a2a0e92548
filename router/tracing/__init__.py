"""Traces of requests: spans are projected from what a request recorded, when it ends (ADR 32)."""
