"""`router demo`: one workload on real processes, round-robin and by KV overlap."""
