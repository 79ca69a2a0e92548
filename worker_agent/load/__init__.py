"""Load reports: statistics and metrics of engines, published over core NATS."""
