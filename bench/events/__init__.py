"""`router bench events`: KV events from an engine to an index: throughput, freshness, recovery, cold start."""
