"""`router bench disagg`: the same GPUs aggregated, and divided into prefill and decode workers, in virtual time."""
