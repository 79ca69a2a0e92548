"""The control plane and the metrics of the router."""
