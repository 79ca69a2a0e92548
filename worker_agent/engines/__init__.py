"""Engines behind one port: what the agent serves."""
