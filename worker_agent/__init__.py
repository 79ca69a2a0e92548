"""Wraps an engine: publishes what its KV cache holds, serves its requests, says how it is.

Engine -> publisher (partial blocks dropped, i64 hashes) -> ZMQ -> consolidator (canonical hashes, one numbered stream
per rank) -> NATS JetStream. The rules are in `core/`, pure; around it are ZMQ, NATS, engines and HTTP.
"""
