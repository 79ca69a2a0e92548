"""Traces: which requests are sampled, and how their spans get to an OpenTelemetry collector."""
