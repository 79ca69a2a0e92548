"""Wraps an engine: publishes what its KV cache holds, serves its requests, reports its load and health.

Engine -> publisher (partial blocks dropped, i64 hashes) -> ZMQ -> consolidator (canonical hashes, one numbered stream
per rank) -> NATS JetStream. A folder is a subject: its pure modules decide, the others do the I/O. `pyproject.toml`
names the pure ones.
"""
