"""The control plane, and the figures of the router as metrics."""
