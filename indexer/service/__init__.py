"""The index as a service: NATS in, HTTP out, snapshots, metrics; and what compares a live index with its sources."""
