"""The simulated fleet beside live recordings of real ones; the fit of its timing."""
