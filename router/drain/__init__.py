"""Draining a worker: it gets no new requests, and prefixes that only it holds are computed elsewhere first."""
