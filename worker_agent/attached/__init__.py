"""Brings an engine that runs elsewhere into the fleet: `worker-agent attach`, and routers that attach engines."""
