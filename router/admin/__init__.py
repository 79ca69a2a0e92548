"""The control plane of the router."""
