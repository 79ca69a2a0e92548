"""Draining a worker: it gets no new requests, and prefixes that it alone holds are computed elsewhere first."""
