"""The index as a service: NATS in, HTTP out, snapshots, metrics; and comparing a live index with its sources."""
