"""A simulated engine, pure and in virtual time: paged blocks, scheduler, timing, tokens."""
