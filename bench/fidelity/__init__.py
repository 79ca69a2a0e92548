"""The simulated fleet beside live recordings of real ones; fitting its timing."""
