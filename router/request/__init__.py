"""A request from its bytes to the end of its answer.

endpoints.py, replies.py     what answers a path
request.py                   a request's life; `callback_coroutine.py` runs it
destination.py               what a request's life asks of the place that serves it, and the tries there
serving.py                   that place for a fleet: admission and decisions. It also reads requests (`reading.py`,
                             `route_request.py`), builds the calls to workers (`calls.py`) and records what happens
                             (`records.py`, `tracing.py`)
handoff.py, resumption.py    the bodies of requests that a second worker continues
"""
