"""The index as a service: NATS in, HTTP out, snapshots, metrics; and the comparison of a live index with mirrors."""
