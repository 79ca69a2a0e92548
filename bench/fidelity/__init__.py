"""The simulated fleet beside recordings of real ones; fitting its timing."""
