"""A request from its bytes to the end of its answer.

endpoints.py, replies.py     what answers a path
request.py, attempt.py       a request's life, and its tries at workers; `callback_coroutine.py` runs it
destination.py               what a life asks of where requests go: `serving.py`, the workers of a fleet, which
reads (`reading.py`, `route_request.py`), calls workers (`calls.py`) and records
(`records.py`, `request_log.py`, `tracing.py`)
handoff.py, resumption.py    the bodies of requests that a second worker continues
"""
