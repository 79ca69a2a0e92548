"""A simulated engine: paged blocks, scheduler, timing and tokens in virtual time, pure; and the same live."""
