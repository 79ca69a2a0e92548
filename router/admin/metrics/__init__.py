"""The router's metrics: counted as requests pass, or read from its state at scrape time.

What a request passes are plain additions on objects with slots; they become samples when they are scraped. Every label
set exists at 0 before anything was counted, and goes with the model or worker that it names.
"""

from router.admin.metrics.prompts import prompt_families
from router.admin.metrics.request import RequestMetrics
from router.admin.metrics.sockets import http_families
from router.admin.metrics.state import build_families, policy_families, queue_families, state_families, trust_families

__all__ = [
    "RequestMetrics",
    "build_families",
    "http_families",
    "policy_families",
    "prompt_families",
    "queue_families",
    "state_families",
    "trust_families",
]
