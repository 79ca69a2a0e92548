"""Wraps an engine: publishes what its KV cache holds, serves its requests, says how it is.

Engine -> publisher (partial blocks dropped, i64 hashes) -> ZMQ -> consolidator (canonical hashes, one numbered stream
per rank) -> NATS JetStream. A folder is a subject: pure modules
decide, the others perform. `pyproject.toml` names the pure ones.
"""
