"""Brings an engine into the fleet: publishes what its KV cache holds, serves its requests, reports its load and health.

The engine's events, polled or received over ZeroMQ -> consolidator (canonical hashes, one numbered stream per rank) ->
NATS JetStream. A folder is a subject: its pure modules decide, the others do the I/O. `pyproject.toml` names the pure
ones.
"""
