"""A fleet of simulated engines and the real router core, in virtual time."""
