"""Routers of one fleet send each other their leases."""
