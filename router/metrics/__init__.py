"""The router's metrics: counted as requests pass, or read from its state at scrape time.

On the request path counting is plain additions on objects with slots; samples are made at the scrape. Every label set
exists at 0 from the start, and is removed with the model or worker that it names.
"""

from router.metrics.prompts import prompt_families
from router.metrics.request import RequestMetrics
from router.metrics.sockets import http_families
from router.metrics.state import (
    build_families,
    policy_families,
    queue_families,
    rate_families,
    state_families,
    trust_families,
)

__all__ = [
    "RequestMetrics",
    "build_families",
    "http_families",
    "policy_families",
    "prompt_families",
    "queue_families",
    "rate_families",
    "state_families",
    "trust_families",
]
