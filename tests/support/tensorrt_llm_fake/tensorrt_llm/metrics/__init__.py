"""Metrics of the engine for Prometheus."""

from .collector import MetricsCollector

__all__ = ["MetricsCollector"]
