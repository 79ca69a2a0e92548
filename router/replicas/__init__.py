"""Routers of one fleet tell each other their leases."""
