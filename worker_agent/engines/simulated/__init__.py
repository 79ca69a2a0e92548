"""A simulated engine: blocks, scheduler, timing, tokens are pure, in virtual time; `engine.py` runs them live."""
